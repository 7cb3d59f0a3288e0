"""Finds layers that TensorFlow cannot differentiate twice, before they cost anything.

The gradient of bilinear resizing, for one, has no gradient itself: TensorFlow then returns
none, silently, and a training through inner steps would learn from what is left.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from nsl_keras import rewiring
from nsl_keras.backend.gradients import lost_second_derivatives

Tensor = Any

#: Lost shares that are no rounding errors: a path that is missing takes most of one away.
_TOLERANCE = 0.1

#: They compute with `tf.nn.moments`, as batch norms do, which few-shot learning mends.
_INEXACT = (keras.layers.LayerNormalization, keras.layers.GroupNormalization)


def require_second_derivatives(
    model: keras.layers.Layer,
    input_shape: Sequence[int | None],
    argument: str = "model",
    remedy: str = "",
) -> None:
    """Raises unless a built model can be differentiated twice.

    Each layer of a functional or Sequential model is tried by itself, on a random input;
    any other model or layer as a whole. JAX needs no such check: it differentiates or
    raises.

    Args:
        model: A built model or layer.
        input_shape: Shape of its input, without the batch axis.
        argument: Name of the argument, for the message.
        remedy: What else helps, for the message.

    Raises:
        ValueError: If second derivatives are missing or inexact; it names the layer.
    """
    if keras.backend.backend() == "jax":
        return
    for layer in [model, *rewiring.sublayers(model)]:
        if isinstance(layer, _INEXACT):
            raise ValueError(
                f"`{argument}` must be made of layers whose second derivatives are exact. "
                "On TensorFlow those of Keras's layer and group normalization are not: "
                "they count the mean as a constant in the variance. Use the JAX backend"
                f"{remedy}. "
                f"Received: layer {layer.name!r} of type {type(layer).__name__!r}"
            )
    # A thread of its own is in no graph, under no tape and no scope of another trace.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(_require_all, model, (2, *input_shape), argument, remedy).result()


def _require_all(
    model: keras.layers.Layer, shape: Sequence[int | None], argument: str, remedy: str
) -> None:
    if not rewiring.is_graph(model):
        _require(model, ((keras.KerasTensor(shape),), {}), argument, remedy)
        return
    tried: set[int] = set()
    for call in rewiring.calls(model):
        if id(call.layer) not in tried:
            tried.add(id(call.layer))
            _require(call.layer, call.arguments, argument, remedy)


def _require(
    layer: keras.Operation,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    argument: str,
    remedy: str,
) -> None:
    random = np.random.default_rng(0)
    inputs: list[Tensor] = []

    def example(given: Any) -> Any:
        """A random tensor, noted in `inputs`, in a floating-point one's place."""
        if not isinstance(given, keras.KerasTensor):
            return given
        # Two examples; the sizes that a model leaves open may be any.
        shape = (2, *(8 if size is None else size for size in given.shape[1:]))
        if not _is_float(given):
            return ops.ones(shape, given.dtype)
        inputs.append(ops.cast(random.normal(size=shape), keras.config.floatx()))
        return _Place(len(inputs) - 1)

    pattern = tree.map_structure(example, arguments)
    is_layer = isinstance(layer, keras.layers.Layer)
    variables = list(layer.trainable_variables) if is_layer else []

    def outputs(at: list[Tensor]) -> list[Tensor]:
        args, kwargs = tree.map_structure(
            lambda each: at[each.index] if isinstance(each, _Place) else each, pattern
        )
        mapping = list(zip(variables, at[len(inputs) :], strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            found = layer(*args, **kwargs)
        return [each for each in tree.flatten(found) if _is_float(each)]

    at = [*inputs, *(ops.convert_to_tensor(variable) for variable in variables)]
    if lost_second_derivatives(outputs, at) > _TOLERANCE:
        raise ValueError(
            f"`{argument}` must be made of layers that can be differentiated twice, since "
            "the full gradient runs through the gradients of the inner steps. TensorFlow "
            "has no second derivative for bilinear resizing, for example. Replace the "
            f'layer (`UpSampling2D(interpolation="nearest")` has one){remedy}. '
            f"Received: layer {layer.name!r} of type {type(layer).__name__!r}"
        )


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an argument goes that a derivative is taken with respect to."""

    index: int


def _is_float(tensor: Tensor) -> bool:
    return keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype))
