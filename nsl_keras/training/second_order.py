"""Layers and operations of Keras without exact second derivatives on TensorFlow.

Training through inner steps differentiates gradients. Where TensorFlow has no derivative
of a gradient it returns none, without an error, and the training would learn from what is
left. So those that are known for it are refused by name, in layers and in the graphs of
models. JAX differentiates all of them, or raises.

A batch norm in training mode is inexact as well (it counts the mean as a constant in the
variance); in inference mode it is exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import keras

from nsl_keras import rewiring

#: They normalize by `tf.nn.moments`, which counts the mean as a constant in the variance.
NORMALIZING = (keras.layers.LayerNormalization, keras.layers.GroupNormalization)

#: Interpolations of `UpSampling2D` whose gradient has no gradient.
INTERPOLATIONS = ("bilinear", "bicubic", "lanczos3", "lanczos5")

#: They resize by an operation whose gradient has no gradient.
RESIZING = (keras.layers.Resizing,)

#: Its gradient has no gradient either.
SOFTSIGN = keras.activations.softsign


#: Operations of `keras.ops` in a graph, which have no public class, of the same kinds.
NORMALIZING_OPERATIONS = ("LayerNorm", "Moments")
RESIZING_OPERATIONS = ("Resize",)


def reason_for_inexactness(layer: keras.Operation) -> str | None:
    """Returns why TensorFlow's second derivatives of a layer are wrong, or `None`.

    Args:
        layer: A layer, or an operation of `keras.ops` in a model's graph.
    """
    operation = "" if isinstance(layer, keras.layers.Layer) else type(layer).__name__
    if isinstance(layer, NORMALIZING) or operation in NORMALIZING_OPERATIONS:
        return "it counts the mean as a constant in the variance"
    resizes = isinstance(layer, keras.layers.UpSampling2D) and (
        layer.interpolation in INTERPOLATIONS
    )
    if resizes or isinstance(layer, RESIZING) or operation in RESIZING_OPERATIONS:
        return (
            "the gradient of its resizing has no gradient "
            '(`UpSampling2D(interpolation="nearest")` is exact)'
        )
    if operation == "Softsign" or getattr(layer, "activation", None) is SOFTSIGN:
        return "the gradient of its softsign has no gradient"
    return None


def _operations(model: keras.layers.Layer) -> Iterator[keras.Operation]:
    """Yields the layers of a model at any depth, and operations in the graphs of models."""
    for layer in [model, *rewiring.sublayers(model)]:
        yield layer
        if rewiring.is_graph(layer) and hasattr(layer, "inputs"):
            for call in rewiring.calls(layer):
                if not isinstance(call.layer, keras.layers.Layer):
                    yield call.layer


def require_second_derivatives(
    model: keras.layers.Layer, argument: str = "model", remedy: str = ""
) -> None:
    """Raises if a model holds a layer or operation without exact second derivatives.

    Args:
        model: A model or layer.
        argument: Name of the argument, for the message.
        remedy: What else helps, for the message.

    Raises:
        ValueError: If there is one, on TensorFlow; it names the layer.
    """
    if keras.backend.backend() == "jax":
        return
    for layer in _operations(model):
        reason = reason_for_inexactness(layer)
        if reason:
            raise ValueError(
                f"`{argument}` must be made of layers whose second derivatives are exact: "
                "the full gradient runs through the gradients of the inner steps. On "
                f"TensorFlow those of this layer are not: {reason}. Replace the layer, "
                f"or use the JAX backend{remedy}. Received: layer {layer.name!r} of type "
                f"{type(layer).__name__!r}"
            )
