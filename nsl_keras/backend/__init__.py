"""Functions of TensorFlow or JAX that the package needs, under one name for both.

`backend/jax.py` and `backend/tensorflow.py` define the same functions. Without Keras 3 and
one of the two backends, `import nsl_keras` raises an `ImportError` with what to install.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

SUPPORTED_BACKENDS = ("tensorflow", "jax")


def require_backend() -> None:
    """Raises an `ImportError` unless Keras 3 runs on a supported, installed backend."""
    try:
        import keras
    except ModuleNotFoundError as error:
        raise ImportError(
            "`nsl_keras` needs Keras 3 and TensorFlow or JAX, and could not import "
            f"{error.name!r}. Install it, or select the other backend with the "
            "environment variable KERAS_BACKEND."
        ) from error
    if keras.backend.backend() not in SUPPORTED_BACKENDS:
        raise ImportError(
            f"The Keras backend must be one of {', '.join(SUPPORTED_BACKENDS)} for "
            f"`nsl_keras`. Received: backend={keras.backend.backend()!r}. Set "
            "KERAS_BACKEND to one of them."
        )


require_backend()

import keras  # noqa: E402

if keras.backend.backend() == "tensorflow":
    from nsl_keras.backend.tensorflow import *  # noqa: F403
    from nsl_keras.backend.tensorflow import map_in_loop, on_cpu, sum_in_loop
else:
    from nsl_keras.backend.jax import *  # noqa: F403
    from nsl_keras.backend.jax import map_in_loop, on_cpu, sum_in_loop

#: Elements of the largest tensors in a chunk of `map_chunks`, which a CPU's caches hold.
ELEMENTS = 600_000
#: The most entries in a chunk.
LARGEST_CHUNK = 16

#: What layers and functions compute with: a tensor of the backend, or a symbolic tensor.
Tensor: TypeAlias = Any


def at_least_float32(tensor: Tensor) -> Tensor:
    """Returns a dense tensor in float32, or a wider float; integers as floats."""
    tensor = keras.ops.convert_to_tensor(tensor, sparse=False)
    is_float = keras.backend.is_float_dtype(tensor.dtype)
    dtype = tensor.dtype if is_float else keras.config.floatx()
    return keras.ops.cast(tensor, wide_dtype(dtype))


def wide_dtype(dtype: Any) -> str:
    """Returns float64 for float64, else float32; on JAX `result_type` knows no float64."""
    return "float64" if dtype == "float64" else "float32"


def leave_out_of_xla(layer: keras.layers.Layer) -> None:
    """Keeps TensorFlow's models with a layer out of XLA, Keras's default on a GPU.

    The gradient of the layer's `vectorized_map` makes XLA treat variables as constants and
    recompile every step.
    """
    if keras.backend.backend() == "tensorflow":
        layer.supports_jit = False


def forget_initial_epoch(model: keras.Model) -> None:
    """Lets the next `fit` begin at its own first epoch after `BackupAndRestore`.

    Keras (3.15) leaves the resumed epoch there, at which every further `fit` would begin.
    """
    model._initial_epoch = 0


def variable_scope(model: keras.Model) -> contextlib.AbstractContextManager[Any]:
    """Returns the scope of the `tf.distribute` strategy under which a model was made."""
    strategy = getattr(model, "distribute_strategy", None)  # JAX has none.
    return strategy.scope() if strategy else contextlib.nullcontext()


def sum_over_chunks(
    terms: Callable[[list[Tensor], list[Tensor]], list[Tensor]],
    shared: Sequence[Tensor],
    entries: Sequence[Tensor],
    axes: Sequence[int],
    chunk_size: int | None,
) -> list[Tensor]:
    """Sums what a function returns for chunks of entries, one chunk at a time.

    The backward pass computes each chunk anew, so memory holds the terms of one chunk,
    however many entries there are.

    Args:
        terms: Callable `terms(shared, chunk)` of two lists of tensors, which returns the
            list of tensors to sum. Their shapes must not depend on the chunk's size.
            Derivatives are taken with respect to `shared` and `entries` alone.
        shared: Tensors that all entries have in common.
        entries: Tensors with an axis over the entries, of a known size if there are chunks.
        axes: For each tensor of `entries`, the axis that runs over the entries.
        chunk_size: Largest number of entries in a chunk; `None` for all at once.
    """
    size = entries[0].shape[axes[0]]
    if chunk_size is None or chunk_size >= size:
        return terms(list(shared), list(entries))
    count = math.ceil(size / chunk_size)
    even = math.ceil(size / count)
    rest = size - (count - 1) * even

    def of_chunk(*tensors: Tensor) -> list[Tensor]:
        chunk = zip(tensors[len(shared) :], axes, strict=True)
        moved = [keras.ops.moveaxis(tensor, 0, axis) for tensor, axis in chunk]
        return terms(list(tensors[: len(shared)]), moved)

    pairs = zip(entries, axes, strict=True)
    entries = [keras.ops.moveaxis(tensor, axis, 0) for tensor, axis in pairs]
    chunks = [
        keras.ops.reshape(each[rest:], (count - 1, even, *keras.ops.shape(each)[1:]))
        for each in entries
    ]
    # Tensors, which `cast` returns: TensorFlow's loop would not differentiate by variables.
    shared = [keras.ops.cast(each, each.dtype) for each in shared]
    start = of_chunk(*shared, *(each[:rest] for each in entries))
    return sum_in_loop(of_chunk, shared, start, chunks)


def map_chunks(
    function: Callable[..., Tensor],
    shared: Sequence[Tensor],
    entries: Sequence[Tensor],
    elements: Any,
) -> Tensor:
    """Applies a function to a few entries at a time, along the first axis.

    The backward pass computes each chunk anew, so that memory holds one of them.

    Args:
        function: Callable `function(*shared, *chunk)`, whose output has the chunk's first
            axis and the dtype of the entries.
        shared: Tensors that all entries have in common.
        entries: Tensors with one first axis.
        elements: The size of the largest tensors that the function makes of one entry.
    """
    ops = keras.ops
    size = ops.shape(entries[0])[0]
    count, chunk_size, missing = _division(size, elements)
    no_rest = isinstance(missing, int) and missing == 0
    chunks = []
    for each in entries:
        shape = ops.shape(each)[1:]
        if not no_rest:
            # The first entry fills the last chunk: zeros may be no valid input.
            filling = ops.broadcast_to(each[:1], (missing, *shape))
            each = ops.concatenate([each, ops.stop_gradient(filling)])
        chunks.append(ops.reshape(each, (count, chunk_size, *shape)))
    mapped = map_in_loop(function, shared, chunks)
    shape = ops.shape(mapped)[2:]
    mapped = ops.reshape(mapped, (count * chunk_size, *shape))
    # Not by indexing, whose gradient is slow on a CPU.
    return mapped if no_rest else ops.slice(mapped, [0] * mapped.ndim, (size, *shape))


def _division(size: Any, elements: Any) -> tuple[Any, Any, Any]:
    """Returns the number of chunks, their size, and how many entries the last one lacks."""
    if not on_cpu():
        return 1, size, 0
    known = isinstance(elements, int)
    most = max(min(ELEMENTS // elements, LARGEST_CHUNK), 1) if known else 1
    if most == 1:
        return size, 1, 0
    count = -(-size // most)
    if isinstance(size, int):
        count = max(count, 1)
        most = -(-size // count)
    return count, most, count * most - size
