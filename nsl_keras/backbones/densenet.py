"""Densely connected networks."""

from __future__ import annotations

import itertools
from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.backbones.units import (
    FAST_BATCH_NORMALIZATION,
    GLOROT,
    Factory,
    Units,
    channel_axis,
    check_images,
)
from nsl_keras.backend import Tensor


def densenet_bc(
    depth: int = 40,
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    growth: int = 12,
    dropout: float = 0.2,
    convolution: Factory = keras.layers.Conv2D,
    final_relu: bool = False,
    batch_normalization: Factory = FAST_BATCH_NORMALIZATION,
    kernel_regularizer: Any = None,
    seed: int | None = None,
    name: str | None = None,
) -> keras.Model:
    """Returns a DenseNet-BC of depth `6n + 4` for small images.

    It has a 3x3 convolution to `2 growth` channels and three blocks of `n` bottlenecks.
    Each bottleneck appends `growth` channels to its input (batch norm, ReLU, 1x1
    convolution to `4 growth`, batch norm, ReLU, 3x3 convolution to `growth`). Between the
    blocks are batch norm, ReLU, a 1x1 convolution to half the channels and 2x2 average
    pooling; at the end, batch norm and global average pooling. Dropout follows every
    convolution except the first. The authors place iFiLM after the bottlenecks' batch norms
    only: `add_film(model, lambda layer: re.search("bottleneck.*_norm", layer.name))`.

    Args:
        Same as `convnet4` without `filters`, plus:
        depth: int of the form `6n + 4`. 40 is the depth that the paper names (132
            features, 174,792 trainable parameters); 76 is the network of the authors' code
            and of the paper's results (258 features, 484,140 parameters).
        input_shape: tuple of 3, at least 4x4 pixels.
        growth: int, the channels that each bottleneck adds.
        dropout: float in [0, 1), the share of activations that is dropped.
        convolution: Makes the 3x3 convolutions.
        final_relu: bool, whether a ReLU precedes the pooling, as in the authors' networks
            with a dot-product head.
        seed: int or `None`, the seed of dropout.

    Returns:
        A `keras.Model` from images to features of shape `(batch, features)`.

    Raises:
        ValueError: If `depth` or `dropout` is invalid, or the images are too small.

    Example:

    >>> import nsl_keras
    >>> model = nsl_keras.backbones.densenet_bc(40)
    >>> model.output_shape
    (None, 132)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 4.2, after Huang et al.
        (CVPR 2017). Dropout and the missing last ReLU follow the authors' code.
    """
    bottlenecks, rest = divmod(validation.positive_integer(depth, "depth") - 4, 6)
    if rest or bottlenecks < 1:
        raise ValueError(f"`depth` must be of the form 6n + 4. Received: depth={depth}")
    validation.fraction(dropout, "dropout")
    check_images(input_shape, 4)
    layers = Units(convolution, batch_normalization, kernel_regularizer, GLOROT)
    # Layers with the same seed would drop the same places.
    validation.optional(validation.non_negative_integer, seed, "seed")
    seeds = itertools.repeat(None) if seed is None else itertools.count(seed)

    def unit(inputs: Tensor, filters: int, size: int, name: str) -> Tensor:
        """Batch norm, ReLU, convolution and dropout."""
        outputs = layers.activate(inputs, name)
        outputs = layers.convolve(outputs, filters, size, name)
        if not dropout:
            return outputs
        layer = keras.layers.Dropout(dropout, seed=next(seeds), name=f"{name}_dropout")
        return layer(outputs)

    inputs = keras.Input(input_shape)
    outputs = layers.convolve(inputs, 2 * growth, 3, "root")
    for block in range(3):
        for index in range(bottlenecks):
            at = f"block_{block}_bottleneck_{index}"
            branch = unit(outputs, 4 * growth, 1, f"{at}_layer_1")
            branch = unit(branch, growth, 3, f"{at}_layer_2")
            outputs = keras.layers.Concatenate(channel_axis(), name=at)([outputs, branch])
        if block < 2:
            at = f"transition_{block}"
            outputs = unit(outputs, outputs.shape[channel_axis()] // 2, 1, at)
            outputs = keras.layers.AveragePooling2D(2, name=at)(outputs)
    outputs = layers.normalize(outputs, "final")
    if validation.boolean(final_relu, "final_relu"):
        outputs = keras.layers.ReLU(name="final_relu")(outputs)
    outputs = keras.layers.GlobalAveragePooling2D(name="pool")(outputs)
    return keras.Model(inputs, outputs, name=name or f"densenet_bc_{depth}")
