"""Layers and operations of Keras without exact second derivatives on TensorFlow.

Training through inner steps differentiates gradients. Where TensorFlow has no derivative
of a gradient it silently returns `None`, and training would ignore that part. So
the known ones are refused by name, in layers and in the graphs of models. JAX
differentiates all of them.

A batch norm in training mode is inexact as well (it treats the mean as a constant in the
variance); in inference mode it is exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import keras

from nsl_keras import rewiring

#: Layers, and operations of `keras.ops`, which have no public class, by their names.
NORMALIZING = ("LayerNormalization", "GroupNormalization", "LayerNorm", "Moments")
RESIZING = ("Resizing", "Resize", "CenterCrop")

#: Interpolations of `UpSampling2D` whose gradient has no gradient.
INTERPOLATIONS = ("bilinear", "bicubic", "lanczos3", "lanczos5")


def reason_for_inexactness(layer: keras.Operation) -> str | None:
    """Returns why TensorFlow's second derivatives of a layer are wrong, or `None`.

    Args:
        layer: A layer, or an operation of `keras.ops` in a model's graph.
    """
    kinds = {kind.__name__ for kind in type(layer).__mro__}
    if not kinds.isdisjoint(NORMALIZING):
        return "it treats the mean as a constant in the variance"
    if not kinds.isdisjoint(RESIZING) or (
        isinstance(layer, keras.layers.UpSampling2D)
        and layer.interpolation in INTERPOLATIONS
    ):
        return (
            "the gradient of its resizing has no gradient "
            '(`UpSampling2D(interpolation="nearest")` is exact)'
        )
    softsign = keras.activations.softsign
    if "Softsign" in kinds or getattr(layer, "activation", None) is softsign:
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
    """Raises if a model holds a layer or operation without exact second derivatives."""
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
