"""A network of depthwise and 1x1 convolutions for images of 32x32 pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
from keras import layers


def mobile_net(
    input_shape: tuple[int, int, int],
    classes: int,
    convolution: Callable[..., layers.Layer] = layers.DepthwiseConv2D,
    batch_normalization: Callable[..., layers.Layer] = layers.BatchNormalization,
    filters: Sequence[int] = (32, 64, 128),
) -> keras.Model:
    """MobileNet (Howard et al., 2017) in small: three stages of three blocks.

    `convolution` makes the depthwise convolution of each block, of a kernel size.
    """
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(filters[0], 3, padding="same", use_bias=False, name="root")(inputs)
    x = layers.ReLU()(batch_normalization()(x))
    for stage, width in enumerate(filters):
        for block in range(3):
            name = f"stage_{stage}_block_{block}"
            x = convolution(3, padding="same", use_bias=False, name=name)(x)
            x = layers.ReLU()(batch_normalization()(x))
            x = layers.Conv2D(width, 1, use_bias=False, name=f"{name}_pointwise")(x)
            x = layers.ReLU()(batch_normalization()(x))
        x = layers.MaxPooling2D()(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(classes, name="classifier")(x))
