"""One computation for each element of a batch, one element after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

Tensor = Any

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def map_elements(
        function: Callable[[list[Tensor]], list[Tensor]],
        elements: Sequence[Tensor],
        outputs: Sequence[keras.KerasTensor],
    ) -> list[Tensor]:
        # `keras.ops.map` runs the function once more, on the first element, only to see
        # what it returns: with assertions in it, all of that stays in the graph.
        signature = [tf.TensorSpec(each.shape, each.dtype) for each in outputs]
        return tf.map_fn(function, list(elements), fn_output_signature=signature)

else:
    import jax

    def map_elements(
        function: Callable[[list[Tensor]], list[Tensor]],
        elements: Sequence[Tensor],
        outputs: Sequence[keras.KerasTensor],
    ) -> list[Tensor]:
        del outputs
        return jax.lax.map(function, list(elements))


map_elements.__doc__ = """Applies a function to each element of a batch, in a loop.

The loop is part of the graph, which so holds the function once, and the size of the batch
may be unknown.

Args:
    function: Callable from a list of tensors, one of each of `elements` without its first
        axis, to a list of tensors.
    elements: Tensors of one size along their first axis.
    outputs: Shape and dtype of each tensor that `function` returns.

Returns:
    What `function` returned, stacked along a new first axis.
"""
