"""Keras layers without exact second derivatives on TensorFlow.

Training through inner steps differentiates gradients. Where TensorFlow has no derivative
of a gradient it returns none, without an error, and the training would learn from what is
left. So the layers that are known for it are refused by name. JAX differentiates all of
them, or raises.

A batch norm in training mode is inexact as well (it counts the mean as a constant in the
variance); in inference mode it is exact.
"""

from __future__ import annotations

import keras

from nsl_keras import rewiring

#: They normalize by `tf.nn.moments`, which counts the mean as a constant in the variance.
NORMALIZING = (keras.layers.LayerNormalization, keras.layers.GroupNormalization)

#: Interpolations of `UpSampling2D` whose gradient has no gradient.
INTERPOLATIONS = ("bilinear", "bicubic", "lanczos3", "lanczos5")

#: They resize by an operation whose gradient has no gradient.
RESIZING = (keras.layers.Resizing,)


def reason_for_inexactness(layer: keras.layers.Layer) -> str | None:
    """Returns why TensorFlow's second derivatives of a layer are wrong, or `None`."""
    if isinstance(layer, NORMALIZING):
        return "it counts the mean as a constant in the variance"
    resizes = isinstance(layer, RESIZING) or (
        isinstance(layer, keras.layers.UpSampling2D)
        and layer.interpolation in INTERPOLATIONS
    )
    return "the gradient of its resizing has no gradient" if resizes else None


def require_second_derivatives(
    model: keras.layers.Layer, argument: str = "model", remedy: str = ""
) -> None:
    """Raises if a model holds a layer without exact second derivatives.

    Args:
        model: A model or layer.
        argument: Name of the argument, for the message.
        remedy: What else helps, for the message.

    Raises:
        ValueError: If there is one, on TensorFlow; it names the layer.
    """
    if keras.backend.backend() == "jax":
        return
    for layer in [model, *rewiring.sublayers(model)]:
        reason = reason_for_inexactness(layer)
        if reason:
            raise ValueError(
                f"`{argument}` must be made of layers whose second derivatives are exact: "
                "the full gradient runs through the gradients of the inner steps. On "
                f"TensorFlow those of this layer are not: {reason}. Replace the layer "
                '(`UpSampling2D(interpolation="nearest")` is exact), use the JAX '
                f"backend{remedy}. Received: layer {layer.name!r} of type "
                f"{type(layer).__name__!r}"
            )
