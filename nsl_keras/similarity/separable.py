"""A separable convolution taken apart, so that its depthwise part can have a similarity."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import rewiring


def depthwise_config(layer: keras.layers.SeparableConv2D, name: str) -> dict[str, Any]:
    """Returns the config of the first part: a depthwise convolution without a bias.

    Args:
        layer: A separable convolution.
        name: Name of the part.
    """
    config = layer.get_config()
    kept = (
        "kernel_size",
        "strides",
        "padding",
        "data_format",
        "dilation_rate",
        "depth_multiplier",
        "depthwise_initializer",
        "depthwise_regularizer",
        "depthwise_constraint",
        "dtype",
        "trainable",
    )
    return {**{key: config[key] for key in kept}, "name": name, "use_bias": False}


def pointwise_convolution(layer: keras.layers.SeparableConv2D) -> keras.layers.Conv2D:
    """Returns the second part, a 1x1 convolution with bias and activation, built.

    Args:
        layer: A built separable convolution.
    """
    config = layer.get_config()
    kept = (
        "filters",
        "data_format",
        "activation",
        "use_bias",
        "bias_initializer",
        "bias_regularizer",
        "bias_constraint",
        "activity_regularizer",
        "dtype",
        "trainable",
        "name",
    )
    of_kernel = {
        f"kernel_{what}": config[f"pointwise_{what}"]
        for what in ("initializer", "regularizer", "constraint")
    }
    pointwise = keras.layers.Conv2D.from_config(
        {**{key: config[key] for key in kept}, **of_kernel, "kernel_size": 1}
    )
    shape: list[int | None] = [None] * 4
    axis = -1 if layer.data_format == "channels_last" else 1
    shape[axis] = layer.pointwise_kernel.shape[-2]
    pointwise.build(tuple(shape))
    # Copies: on JAX two layers would share a buffer, which a training step donates.
    pointwise.kernel.assign(ops.convert_to_numpy(layer.pointwise_kernel))
    if layer.use_bias:
        pointwise.bias.assign(ops.convert_to_numpy(layer.bias))
    rewiring.copy_activations(layer, pointwise)
    return pointwise
