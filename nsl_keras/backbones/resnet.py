"""Residual networks."""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.backbones import units

Tensor = Any


def resnet_v2(
    depth: int = 29,
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    film: int | None = None,
    final_relu: bool = False,
    batch_normalization_momentum: float = 0.9,
    synchronized: bool = False,
    kernel_regularizer: Any = None,
    name: str | None = None,
) -> keras.Model:
    """Returns a pre-activation bottleneck ResNet of depth `9n + 2` for small images.

    A 3x3 convolution to 16 channels, three stages of `n` bottleneck blocks (1x1 to
    16/64/128, 3x3, 1x1 to 64/128/256; stride 2 at the second and third stage), batch
    norm and global average pooling: 256 features. ResNet-29 with 3 input channels has
    838,160 trainable parameters, ResNet-56 1,655,120.

    Args:
        depth: int of the form `9n + 2`: 29 and 56 in the paper.
        input_shape: tuple of 3, height, width and channels (in the order of
            `keras.config.image_data_format()`).
        film: int or `None`, the dictionary size of an iFiLM behind each batch norm but
            the first.
        final_relu: bool, whether a ReLU stands before the pooling; the paper leaves it
            out, except with a dot-product head.
        batch_normalization_momentum: float in [0, 1).
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy. Unsynchronised replicas drift apart.
        kernel_regularizer: Regularizer of the convolutions' kernels.
        name: str or `None`, the model's name.

    Returns:
        A functional `keras.Model` from images to features of shape `(batch, 256)`.

    Raises:
        ValueError: If `depth` is not of the form `9n + 2`.

    Example:

    >>> import nsl_keras
    >>> nsl_keras.backbones.resnet_v2(29).output_shape
    (None, 256)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 4.2. Layout from the
        authors' code, which also puts an iFiLM without a batch norm before the very
        first block and on the shortcuts; here, as in the paper, each stands behind a
        batch norm.
    """
    blocks, rest = divmod(validation.positive_integer(depth, "depth") - 2, 9)
    if rest or blocks < 1:
        raise ValueError(f"`depth` must be of the form 9n + 2. Received: depth={depth}")

    def convolve(inputs: Tensor, filters: int, size: int, name: str, stride: int = 1):
        return units.convolution(
            filters,
            size,
            strides=stride,
            kernel_regularizer=kernel_regularizer,
            name=f"{name}_convolution",
        )(inputs)

    def normalize(inputs: Tensor, name: str, film: int | None = film):
        return units.normalize(
            inputs,
            momentum=batch_normalization_momentum,
            synchronized=synchronized,
            film=film,
            name=name,
        )

    inputs = keras.Input(input_shape)
    outputs = convolve(inputs, 16, 3, "root")
    outputs = keras.layers.ReLU()(normalize(outputs, "root", film=None))
    for stage, (inner, outer) in enumerate(((16, 64), (64, 128), (128, 256))):
        for block in range(blocks):
            at = f"stage_{stage}_block_{block}"
            stride = 2 if stage > 0 and block == 0 else 1
            branch = outputs
            if stage > 0 or block > 0:
                branch = keras.layers.ReLU()(normalize(branch, f"{at}_layer_1"))
            branch = convolve(branch, inner, 1, f"{at}_layer_1", stride)
            branch = keras.layers.ReLU()(normalize(branch, f"{at}_layer_2"))
            branch = convolve(branch, inner, 3, f"{at}_layer_2")
            branch = keras.layers.ReLU()(normalize(branch, f"{at}_layer_3"))
            branch = convolve(branch, outer, 1, f"{at}_layer_3")
            if block == 0:
                outputs = convolve(outputs, outer, 1, f"{at}_shortcut", stride)
            outputs = keras.layers.Add()([outputs, branch])
    outputs = normalize(outputs, "final")
    if final_relu:
        outputs = keras.layers.ReLU()(outputs)
    outputs = keras.layers.GlobalAveragePooling2D()(outputs)
    return keras.Model(inputs, outputs, name=name or f"resnet_v2_{depth}")
