"""Sums over many entries, a chunk at a time, in the forward and the backward pass.

Nothing of a chunk outlives it: the backward pass computes each chunk anew. So memory
holds the terms of one chunk, however many entries there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

Tensor = Any
Terms = Callable[[list[Tensor], list[Tensor]], list[Tensor]]


def sum_over_chunks(
    terms: Terms,
    shared: Sequence[Tensor],
    entries: Sequence[Tensor],
    axes: Sequence[int],
    chunk_size: int,
) -> list[Tensor]:
    """Sums what a function returns for chunks of entries.

    Args:
        terms: Callable `terms(shared, chunk)` of two lists of tensors, which returns the
            list of what is to be summed. Its shapes do not depend on the chunk's size.
            Derivatives are taken with respect to `shared` and `entries` alone.
        shared: Tensors that all entries have in common.
        entries: Tensors with an axis over the entries, of a known size.
        axes: The axis of each of `entries` that runs over the entries.
        chunk_size: Largest number of entries in a chunk.

    Returns:
        The sums, in a list.
    """
    size = entries[0].shape[axes[0]]
    if chunk_size >= size:
        return terms(list(shared), list(entries))
    # Even chunks: a smaller last one is computed beside the loop, which takes longer.
    even = math.ceil(size / math.ceil(size / chunk_size))
    return _looped(terms, list(shared), list(entries), list(axes), even)


def _added(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    return [one + other for one, other in zip(first, second, strict=True)]


if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def _looped(
        terms: Terms,
        shared: list[Tensor],
        entries: list[Tensor],
        axes: list[int],
        chunk_size: int,
    ) -> list[Tensor]:
        # The gradient of a `while_loop` would keep what each of its rounds computes.
        @tf.custom_gradient
        def total(*tensors: Tensor) -> tuple[list[Tensor], Callable[..., list[Tensor]]]:
            shared, entries = list(tensors[: -len(axes)]), tensors[-len(axes) :]
            chunks, rest = divmod(entries[0].shape[axes[0]], chunk_size)

            def chunk(index: Tensor, size: int) -> list[Tensor]:
                return [
                    _slice(tensor, axis, index * chunk_size, size)
                    for tensor, axis in zip(entries, axes, strict=True)
                ]

            def add(index: Tensor, sums: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
                return index + 1, _added(sums, terms(shared, chunk(index, chunk_size)))

            def gradient(*upstream: Tensor) -> list[Tensor]:
                def of_chunk(index: Tensor, size: int) -> tuple[list[Tensor], list[Tensor]]:
                    at = [*shared, *chunk(index, size)]
                    with tf.GradientTape(watch_accessed_variables=False) as tape:
                        tape.watch(at)
                        sums = terms(at[: len(shared)], at[len(shared) :])
                    found = tape.gradient(
                        sums,
                        at,
                        output_gradients=list(upstream),
                        unconnected_gradients=tf.UnconnectedGradients.ZERO,
                    )
                    return found[: len(shared)], [
                        _moved(tensor, axis, 0)
                        for tensor, axis in zip(found[len(shared) :], axes, strict=True)
                    ]

                def collect(index: Tensor, of_shared: Any, of_entries: Any) -> Any:
                    more, found = of_chunk(index, chunk_size)
                    written = [
                        array.write(index, tensor)
                        for array, tensor in zip(of_entries, found, strict=True)
                    ]
                    return index + 1, _added(of_shared, more), written

                _, of_shared, arrays = tf.while_loop(
                    lambda index, *_: index < chunks,
                    collect,
                    (
                        tf.constant(0),
                        [tf.zeros_like(tensor) for tensor in shared],
                        [tf.TensorArray(tensor.dtype, chunks) for tensor in entries],
                    ),
                    parallel_iterations=1,
                    maximum_iterations=chunks,
                )
                of_entries = [array.concat() for array in arrays]
                if rest:
                    more, found = of_chunk(chunks, rest)
                    of_shared = _added(of_shared, more)
                    of_entries = [
                        tf.concat(parts, 0) for parts in zip(of_entries, found, strict=True)
                    ]
                return of_shared + [
                    _moved(tensor, 0, axis)
                    for tensor, axis in zip(of_entries, axes, strict=True)
                ]

            _, sums = tf.while_loop(
                lambda index, _: index < chunks,
                add,
                (tf.constant(1), terms(shared, chunk(0, chunk_size))),
                parallel_iterations=1,
                maximum_iterations=chunks - 1,
            )
            if rest:
                sums = _added(sums, terms(shared, chunk(chunks, rest)))
            return sums, gradient

        # A variable would be none of the arguments.
        return list(total(*map(tf.convert_to_tensor, [*shared, *entries])))

    def _slice(tensor: Tensor, axis: int, start: Tensor, size: int) -> Tensor:
        begin = [0] * tensor.shape.rank
        begin[axis] = start
        sizes = [-1] * tensor.shape.rank
        sizes[axis] = size
        part = tf.slice(tensor, begin, sizes)
        part.set_shape([*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]])
        return part

    def _moved(tensor: Tensor, source: int, target: int) -> Tensor:
        return keras.ops.moveaxis(tensor, source, target)

else:
    import jax

    def _looped(
        terms: Terms,
        shared: list[Tensor],
        entries: list[Tensor],
        axes: list[int],
        chunk_size: int,
    ) -> list[Tensor]:
        chunks, rest = divmod(entries[0].shape[axes[0]], chunk_size)

        @jax.checkpoint
        def add(sums: list[Tensor], chunk: list[Tensor]) -> tuple[list[Tensor], None]:
            moved = [
                jax.numpy.moveaxis(tensor, 0, axis)
                for tensor, axis in zip(chunk, axes, strict=True)
            ]
            return _added(sums, terms(shared, moved)), None

        first = [jax.numpy.moveaxis(*pair, 0) for pair in zip(entries, axes, strict=True)]
        whole = chunks * chunk_size
        stacked = [
            tensor[:whole].reshape(chunks, chunk_size, *tensor.shape[1:])
            for tensor in first
        ]
        shapes = jax.eval_shape(terms, shared, entries)
        sums = [jax.numpy.zeros(shape.shape, shape.dtype) for shape in shapes]
        sums, _ = jax.lax.scan(add, sums, stacked)
        if rest:
            sums, _ = add(sums, [tensor[whole:] for tensor in first])
        return sums
