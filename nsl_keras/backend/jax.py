"""Functions of JAX that the package needs beyond `keras.ops`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import keras

Function: TypeAlias = Callable[..., Any]
Tensors: TypeAlias = Sequence[Any]

#: TensorFlow's own; JAX differentiates functions.
GradientTape = None


# Derivatives.


def gradients_of(function: Function, at: Tensors) -> tuple[list[Any], Any]:
    """Returns the differentiable gradients of a scalar, and the auxiliary output.

    The function takes a list of tensors and returns the scalar and an auxiliary output.
    """
    return jax.grad(function, has_aux=True)(list(at))


def gradients_of_columns(function: Function, at: Any) -> list[Any]:
    """Returns the gradients of the sum of each column of an output."""
    outputs, pull_back = jax.vjp(function, at)
    columns = jax.numpy.eye(outputs.shape[-1], dtype=outputs.dtype)
    return [pull_back(jax.numpy.broadcast_to(row, outputs.shape))[0] for row in columns]


# Loops.

#: Applies a function to all elements of a batch at once; the batch may be empty.
vectorized_map = keras.ops.vectorized_map


def map_elements(function: Function, elements: Tensors, outputs: Tensors) -> list[Any]:
    """Applies a function to each element of a batch, in a loop."""
    return jax.lax.map(function, list(elements))


def sum_in_loop(
    terms: Function, shared: Tensors, start: Tensors, chunks: Tensors
) -> list[Any]:
    """Adds what a function returns for each chunk; see `sum_over_chunks`."""

    @jax.checkpoint
    def add(sums: list[Any], chunk: list[Any]) -> tuple[list[Any], None]:
        more = terms(*shared, *chunk)
        return [one + other for one, other in zip(sums, more, strict=True)], None

    sums: list[Any] = jax.lax.scan(add, list(start), list(chunks))[0]
    return sums


def map_in_loop(function: Function, shared: Tensors, chunks: Tensors) -> Any:
    """Applies a function to chunk after chunk; see `map_chunks`."""
    of_chunk = jax.checkpoint(lambda chunk: function(*shared, *chunk))
    return jax.lax.map(of_chunk, list(chunks))


# Graphs.


def compiled(function: Function, jit_compile: bool) -> Function:
    """Returns the function compiled by XLA, whatever `jit_compile` is."""
    return jax.jit(function)


def not_inlined(function: Function) -> Function:
    """Returns the function: JAX compiles everything together."""
    return function


def outside_traces() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which operations on constants run at once."""
    return jax.ensure_compile_time_eval()


def update_before(
    model: keras.Model, update: Callable[[], None], arguments: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Assigns variables of a model by `update()`, before its function of a batch runs.

    Returns the function's arguments, the first of which holds the variables' values.
    """
    (trainable, fixed, *others), *rest = arguments
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    given = zip(variables, [*trainable, *fixed], strict=True)
    with keras.StatelessScope(state_mapping=[*given]) as scope:
        update()
    fixed = [scope.get_current_value(each) for each in model.non_trainable_variables]
    return ((trainable, fixed, *others), *rest)


# Serving.


def largest(tensor: Any, k: int) -> tuple[Any, Any]:
    """Returns the `k` largest entries along the last axis, and their indices.

    It sorts, because TensorFlow 2.21 cannot load the `top_k` that JAX exports.
    """
    # JAX 0.4.30 does not differentiate a sort of unknown sizes.
    indices = keras.ops.argsort(keras.ops.stop_gradient(-tensor), axis=-1)[..., :k]
    return keras.ops.take_along_axis(tensor, indices, axis=-1), indices


def require_shapes(tensors: Any, specs: Any) -> Any:
    """Returns the tensors: JAX itself checks their shapes."""
    return tensors


# Devices.


def on_cpu() -> bool:
    """Returns whether JAX computes on a CPU."""
    device: str = jax.default_backend()
    return device == "cpu"


#: `keras.distribution` runs one program on all devices, with Keras's own steps.
ReplicatedModel = keras.Model


def replicas_in_sync() -> int:
    """Returns 1, since a program sees the whole batch, whatever devices share it."""
    return 1
