"""Residual networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.backbones.units import (
    FAST_BATCH_NORMALIZATION,
    GLOROT,
    Factory,
    Units,
    check_images,
)
from nsl_keras.backend import Tensor
from nsl_keras.training.normalization import BatchNormalization


def resnet_v2(
    depth: int = 29,
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    convolution: Factory = keras.layers.Conv2D,
    final_relu: bool = False,
    batch_normalization: Factory = FAST_BATCH_NORMALIZATION,
    kernel_regularizer: Any = None,
    name: str | None = None,
) -> keras.Model:
    """Returns a pre-activation bottleneck ResNet of depth `9n + 2` for small images.

    It has a 3x3 convolution to 16 channels, three stages of `n` bottleneck blocks (1x1 to
    16/64/128, 3x3, 1x1 to 64/128/256; stride 2 at the second and third stage), batch
    norm and global average pooling: 256 features. ResNet-29 with 3 input channels has
    838,160 trainable parameters, ResNet-56 has 1,655,120. The authors place iFiLM after
    each batch norm except the first, after the shortcuts' convolutions, and after the first
    block's `_layer_1_input`.

    Args:
        Same as `densenet_bc` without `growth`, `dropout` and `seed`, plus:
        depth: int of the form `9n + 2`: 29 and 56 in the paper.
        input_shape: tuple of 3, of any size.

    Returns:
        A `keras.Model` from images to features of shape `(batch, 256)`.

    Raises:
        ValueError: If `depth` is not of the form `9n + 2`.

    Example:

    >>> import nsl_keras
    >>> model = nsl_keras.backbones.resnet_v2(29)
    >>> model.output_shape
    (None, 256)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 4.2; layout from the
        authors' code.
    """
    blocks, rest = divmod(validation.positive_integer(depth, "depth") - 2, 9)
    if rest or blocks < 1:
        raise ValueError(f"`depth` must be of the form 9n + 2. Received: depth={depth}")
    check_images(input_shape, 1)
    layers = Units(convolution, batch_normalization, kernel_regularizer, GLOROT)
    inputs = keras.Input(input_shape)
    outputs = layers.unit(inputs, 16, 3, "root")
    for stage, (inner, outer) in enumerate(((16, 64), (64, 128), (128, 256))):
        for block in range(blocks):
            at = f"stage_{stage}_block_{block}"
            stride = 2 if stage > 0 and block == 0 else 1
            if stage == block == 0:
                # The root has normalized it. An iFiLM can follow this layer.
                branch = keras.layers.Identity(name=f"{at}_layer_1_input")(outputs)
            else:
                branch = layers.activate(outputs, f"{at}_layer_1")
            branch = layers.convolve(branch, inner, 1, f"{at}_layer_1", strides=stride)
            branch = layers.activate(branch, f"{at}_layer_2")
            branch = layers.convolve(branch, inner, 3, f"{at}_layer_2")
            branch = layers.activate(branch, f"{at}_layer_3")
            branch = layers.convolve(branch, outer, 1, f"{at}_layer_3")
            if block == 0:
                outputs = layers.convolve(
                    outputs, outer, 1, f"{at}_shortcut", strides=stride
                )
            outputs = keras.layers.Add(name=f"{at}_add")([outputs, branch])
    outputs = layers.normalize(outputs, "final")
    if validation.boolean(final_relu, "final_relu"):
        outputs = keras.layers.ReLU(name="final_relu")(outputs)
    outputs = keras.layers.GlobalAveragePooling2D(name="pool")(outputs)
    return keras.Model(inputs, outputs, name=name or f"resnet_v2_{depth}")


def resnet18(
    input_shape: tuple[int | None, int | None, int] = (224, 224, 3),
    classes: int | None = 1000,
    convolution: Factory = keras.layers.Conv2D,
    filters: int | Sequence[int] = (64, 128, 256, 512),
    batch_normalization: Factory = BatchNormalization,
    kernel_regularizer: Any = None,
    name: str = "resnet18",
) -> keras.Model:
    """Returns the post-activation ResNet-18 for ImageNet.

    It has a 7x7 convolution of stride 2, 3x3 max pooling of stride 2, four stages of two
    blocks of two 3x3 convolutions each, global average pooling and a dense classifier.
    All sides have equal padding, as in the published ResNets. It has 11,689,512 trainable
    parameters.

    Args:
        Same as `cnn9` without `variant` and `plus`, plus:
        input_shape: tuple of 3, of any size.
        classes: int, or `None` for the features.
        convolution: Makes the 3x3 convolutions and the 7x7 one. A shared predictor has one
            kernel size: return a `keras.layers.Conv2D` for kernel size 7.
        filters: int or 4 ints, the filters of the stages; the first is also that
            of the 7x7 convolution.
        batch_normalization: See `convnet4`.

    Returns:
        A `keras.Model` from images to logits of shape `(batch, classes)`, or to features
        of shape `(batch, filters[-1])`.

    Raises:
        ValueError: If `filters` is invalid.

    Example:

    >>> import nsl_keras
    >>> model = nsl_keras.backbones.resnet18((64, 64, 3), 10, filters=(8, 16, 32, 64))
    >>> model.output_shape
    (None, 10)

    Reference:
        He et al. (CVPR 2016); with similarity: the authors' response to the reviews of
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Table 2.
    """
    layers = Units(convolution, batch_normalization, kernel_regularizer)
    return _resnet_v1(
        layers, _basic_block, (2, 2, 2, 2), input_shape, classes, filters, name
    )


def resnet50(
    input_shape: tuple[int | None, int | None, int] = (224, 224, 3),
    classes: int | None = 1000,
    convolution: Factory = keras.layers.Conv2D,
    filters: int | Sequence[int] = (64, 128, 256, 512),
    batch_normalization: Factory = BatchNormalization,
    kernel_regularizer: Any = None,
    name: str = "resnet50",
) -> keras.Model:
    """Returns the post-activation ResNet-50 for ImageNet.

    As `resnet18`, with 3, 4, 6 and 3 bottleneck blocks: 1x1, 3x3 and 1x1 convolutions, the
    last with 4x the filters. The first 1x1 has the stride, as in
    `keras.applications.ResNet50`. It has 25,557,032 trainable parameters: those of that
    network without the biases of its convolutions.

    Args:
        Same as `resnet18`, plus:
        filters: int or 4 ints, the filters of the stages' 3x3 convolutions.

    Returns:
        A `keras.Model` from images to logits of shape `(batch, classes)`, or to features
        of shape `(batch, 4 * filters[-1])`.

    Example:

    >>> import nsl_keras
    >>> model = nsl_keras.backbones.resnet50((64, 64, 3), None, filters=(4, 8, 16, 32))
    >>> model.output_shape
    (None, 128)

    Reference:
        See `resnet18`.
    """
    layers = Units(convolution, batch_normalization, kernel_regularizer)
    return _resnet_v1(
        layers, _bottleneck_block, (3, 4, 6, 3), input_shape, classes, filters, name
    )


def _basic_block(
    layers: Units, inputs: Tensor, width: int, stride: int, name: str
) -> tuple[Tensor, int]:
    """Two 3x3 convolutions; returns the branch and its channels."""
    outputs = _unit(layers, inputs, width, 3, stride, name=f"{name}_layer_1")
    outputs = layers.convolve(outputs, width, 3, f"{name}_layer_2")
    return layers.normalize(outputs, f"{name}_layer_2"), width


def _bottleneck_block(
    layers: Units, inputs: Tensor, width: int, stride: int, name: str
) -> tuple[Tensor, int]:
    """1x1, 3x3 and 1x1 convolution; returns the branch and its channels."""
    outputs = layers.unit(inputs, width, 1, f"{name}_layer_1", strides=stride)
    outputs = layers.unit(outputs, width, 3, f"{name}_layer_2")
    outputs = layers.convolve(outputs, 4 * width, 1, f"{name}_layer_3")
    return layers.normalize(outputs, f"{name}_layer_3"), 4 * width


def _unit(
    layers: Units, inputs: Tensor, width: int, size: int, stride: int, name: str
) -> Tensor:
    """Convolution, batch norm and ReLU; with strides, zeros on all sides alike."""
    padding = "same"
    if stride > 1:
        # "same" would pad one side of the image with the odd row of zeros.
        inputs = keras.layers.ZeroPadding2D(size // 2, name=f"{name}_padding")(inputs)
        padding = "valid"
    return layers.unit(inputs, width, size, name, strides=stride, padding=padding)


def _resnet_v1(
    layers: Units,
    block: Callable[..., tuple[Tensor, int]],
    counts: tuple[int, ...],
    input_shape: tuple[int | None, int | None, int],
    classes: int | None,
    filters: int | Sequence[int],
    name: str,
) -> keras.Model:
    widths = validation.positive_integers(filters, 4, "filters")
    check_images(input_shape, 1)
    inputs = keras.Input(input_shape)
    outputs = _unit(layers, inputs, widths[0], 7, stride=2, name="root")
    # Zeros are as good as -inf after a ReLU.
    outputs = keras.layers.ZeroPadding2D(1, name="root_pool_padding")(outputs)
    outputs = keras.layers.MaxPooling2D(3, strides=2, name="root_pool")(outputs)
    channels = widths[0]
    for stage, (count, width) in enumerate(zip(counts, widths, strict=True)):
        for index in range(count):
            at = f"stage_{stage}_block_{index}"
            stride = 2 if stage > 0 and index == 0 else 1
            branch, branch_channels = block(layers, outputs, width, stride, name=at)
            if stride > 1 or branch_channels != channels:
                outputs = layers.convolve(
                    outputs, branch_channels, 1, f"{at}_shortcut", strides=stride
                )
                outputs = layers.normalize(outputs, f"{at}_shortcut")
            outputs = keras.layers.Add(name=f"{at}_add")([outputs, branch])
            outputs = keras.layers.ReLU(name=f"{at}_relu")(outputs)
            channels = branch_channels
    outputs = keras.layers.GlobalAveragePooling2D(name="pool")(outputs)
    if classes is not None:
        outputs = layers.dense(outputs, classes, "classifier")
    return keras.Model(inputs, outputs, name=name)
