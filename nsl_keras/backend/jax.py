"""What the package asks of JAX beyond `keras.ops`.

`nsl_keras.backend.tensorflow` has the same functions for TensorFlow, with their arguments
described.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras

BackendTensor: TypeAlias = jax.Array

#: TensorFlow's own; JAX differentiates functions.
GradientTape = None


# Derivatives.


def gradients_of(
    function: Callable[[list[Any]], tuple[Any, Any]], at: Sequence[Any]
) -> tuple[list[Any], Any]:
    """Returns the gradients of a scalar function, themselves differentiable."""
    return jax.grad(function, has_aux=True)(list(at))


def gradients_of_columns(function: Callable[[Any], Any], at: Any) -> list[Any]:
    """Returns the gradients of the sum of each column of an output."""
    outputs, pull_back = jax.vjp(function, at)
    zeros = jnp.zeros_like(outputs)
    return [pull_back(zeros.at[:, column].set(1))[0] for column in range(outputs.shape[1])]


# Loops.


def map_elements(
    function: Callable[[list[Any]], list[Any]],
    elements: Sequence[Any],
    outputs: Sequence[keras.KerasTensor],
) -> list[Any]:
    """Applies a function to each element of a batch, in a loop."""
    del outputs
    return jax.lax.map(function, list(elements))


def sum_in_loop(
    terms: Callable[[list[Any], list[Any]], list[Any]],
    shared: list[Any],
    entries: list[Any],
    axes: list[int],
    chunk_size: int,
) -> list[Any]:
    """Returns the sums of `terms(shared, chunk)` over chunks of entries, in a loop."""
    chunks, rest = divmod(entries[0].shape[axes[0]], chunk_size)

    @jax.checkpoint
    def add(sums: list[Any], chunk: list[Any]) -> tuple[list[Any], None]:
        moved = [
            jnp.moveaxis(tensor, 0, axis) for tensor, axis in zip(chunk, axes, strict=True)
        ]
        more = terms(shared, moved)
        return [one + other for one, other in zip(sums, more, strict=True)], None

    first = [jnp.moveaxis(*pair, 0) for pair in zip(entries, axes, strict=True)]
    whole = chunks * chunk_size
    stacked = [
        tensor[:whole].reshape(chunks, chunk_size, *tensor.shape[1:]) for tensor in first
    ]
    shapes = jax.eval_shape(terms, shared, entries)
    sums = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
    sums, _ = jax.lax.scan(add, sums, stacked)
    if rest:
        sums, _ = add(sums, [tensor[whole:] for tensor in first])
    return sums


# Graphs.


def compiled(function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
    """Returns the function compiled: JAX knows no other way than XLA."""
    del jit_compile
    return jax.jit(function)


def apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function: all is compiled together."""
    return function


def outside_traces() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which operations on constants run at once."""
    return jax.ensure_compile_time_eval()


def is_known(tensor: Any) -> bool:
    """Whether a tensor has its value already: it is not being traced."""
    return not isinstance(tensor, jax.core.Tracer)


def assert_in_graph(tensor: Any, condition: Any, *message: Any) -> Any:
    """Returns `tensor`: JAX has no assertion that survives `jit`."""
    del condition, message
    return tensor


# Normalization.


def fused_batch_normalization(
    images: Any, scale: Any, offset: Any, epsilon: float
) -> tuple[Any, Any, Any]:
    """Normalises float32 images, channels last, by themselves; XLA fuses by itself."""
    mean, variance = keras.ops.moments(images, axes=(0, 1, 2))
    outputs = (images - mean) * keras.ops.rsqrt(variance + epsilon) * scale + offset
    return outputs, mean, variance


# Pooling.


def max_pooling(
    images: Any, pool_size: Sequence[int], strides: Sequence[int], padding: str
) -> Any:
    """Pools images, channels last."""
    return keras.ops.max_pool(
        images, tuple(pool_size), tuple(strides), padding, "channels_last"
    )


# Serving.


def largest(tensor: Any, k: int) -> tuple[Any, Any]:
    """Returns the `k` largest entries along the last axis, and where they are.

    Sorted, not by `top_k`: TensorFlow 2.21 cannot read what JAX makes of that.
    """
    indices = keras.ops.argsort(-tensor, axis=-1)[..., :k]
    return keras.ops.take_along_axis(tensor, indices, axis=-1), indices


def require_shapes(tensors: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    """Returns the tensors, whose shapes JAX itself checks."""
    del shapes
    return list(tensors)


def at_any_batch_size(function: Callable[[list[Any]], Any], tensors: Sequence[Any]) -> Any:
    """Returns what a function computes of tensors with a batch axis, which may be empty."""
    return function(list(tensors))


# Data and devices.


def endless_dataset(batch: Callable[[int], Any]) -> Any:
    """Raises: `tf.data` is TensorFlow's."""
    del batch
    raise RuntimeError(
        "A tf.data.Dataset needs the TensorFlow backend. Received: "
        f"backend={keras.backend.backend()!r}. Take a keras.utils.PyDataset."
    )


class ReplicatedSteps(keras.Model):
    """A Keras model: on JAX, Keras's distribution API runs one program on all devices.

    It takes no batch that does not divide among them: of arrays, that is told beforehand.
    """

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        _require_even(x, batch_size)
        held_out = options.get("validation_data")
        if isinstance(held_out, (tuple, list)):
            _require_even(held_out[0], options.get("validation_batch_size") or batch_size)
        return super().fit(x, y, batch_size, *args, **options)

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        _require_even(x, batch_size)
        return super().evaluate(x, y, batch_size, *args, **options)

    def predict(self, x: Any, batch_size: Any = None, *args: Any, **options: Any) -> Any:
        _require_even(x, batch_size)
        return super().predict(x, batch_size, *args, **options)


def _require_even(x: Any, batch_size: Any) -> None:
    """Raises for arrays with a batch that does not divide among the devices."""
    distribution = keras.distribution.distribution()
    leaves = keras.tree.flatten(x)
    if distribution is None or not all(hasattr(each, "__array__") for each in leaves):
        return
    mesh = distribution.device_mesh
    parts = mesh.shape[mesh.axis_names.index(distribution.batch_dim_name)]
    examples, size = len(leaves[0]), batch_size or 32
    if any(each % parts for each in (min(size, examples), examples % size)):
        raise ValueError(
            "`batch_size` must leave no batch that does not divide among the "
            f"{parts} devices of `keras.distribution`: take another one, or leave examples "
            f"out. Received: batch_size={size} for {examples} examples, the last "
            f"{examples % size or size} of them in a batch"
        )


def is_first_process(model: keras.Model) -> bool:
    """Whether this process is the first of those that train the model, or the only one."""
    del model  # All processes train it.
    return jax.process_index() == 0


def start_workers(timeout: float) -> Any:
    """Raises: strategies are TensorFlow's."""
    del timeout
    raise RuntimeError(
        "`multi_worker_strategy` needs the TensorFlow backend; on JAX take "
        "keras.distribution.initialize and keras.distribution.DataParallel. Received: "
        f"backend={keras.backend.backend()!r}"
    )


def on_all_replicas(examples: Any) -> Any:
    """Returns how many examples a batch has: those of the one program on all devices."""
    return keras.ops.cast(examples, "float32")


def weighed(loss: Any) -> Any:
    """Returns the loss, which is of all devices."""
    return loss


def counted(tensors: Any) -> Any:
    """Returns the tensors, whose examples all count."""
    return tensors


def variable_scope(model: keras.Model) -> contextlib.AbstractContextManager[Any]:
    """Returns a scope that does nothing."""
    del model
    return contextlib.nullcontext()
