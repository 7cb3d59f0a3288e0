"""First derivatives that can be differentiated once more, on either backend.

TensorFlow records them on a `GradientTape`, JAX traces them with `jax.grad`; the code
above this module sees one function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

Tensor = Any

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    GradientTape = tf.GradientTape

    def gradients_of(
        function: Callable[[list[Tensor]], tuple[Tensor, Any]],
        at: Sequence[Tensor],
    ) -> tuple[list[Tensor], Any]:
        at = [tf.convert_to_tensor(tensor) for tensor in at]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(at)
            value, auxiliary = function(at)
        gradients = tape.gradient(
            value, at, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return gradients, auxiliary

    def gradients_of_columns(
        function: Callable[[Tensor], Tensor], at: Tensor
    ) -> list[Tensor]:
        at = tf.convert_to_tensor(at)
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(at)
            columns = tf.unstack(function(at), axis=-1)
        return [
            tape.gradient(column, at, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            for column in columns
        ]

else:
    import jax
    import jax.numpy as jnp

    def gradients_of(
        function: Callable[[list[Tensor]], tuple[Tensor, Any]],
        at: Sequence[Tensor],
    ) -> tuple[list[Tensor], Any]:
        return jax.grad(function, has_aux=True)(list(at))

    def gradients_of_columns(
        function: Callable[[Tensor], Tensor], at: Tensor
    ) -> list[Tensor]:
        outputs, pull_back = jax.vjp(function, at)
        zeros = jnp.zeros_like(outputs)
        return [
            pull_back(zeros.at[:, column].set(1))[0] for column in range(outputs.shape[1])
        ]


gradients_of.__doc__ = """Gradients of a scalar function, themselves differentiable.

Args:
    function: Callable that takes the list `at` and returns `(value, auxiliary)`, with a
        scalar `value`.
    at: Tensors at which the derivative is taken.

Returns:
    `(gradients, auxiliary)`: one gradient per tensor of `at` (zero where `value` does
    not depend on it), and what `function` returned beside the value.
"""

gradients_of_columns.__doc__ = """Gradients of the sum of each column of an output.

Where a row of the outputs depends on its own row of `at` alone, these are all of its
derivatives.

Args:
    function: Callable from `at` to a tensor of shape `(rows, columns)`.
    at: Tensor at which the derivatives are taken.

Returns:
    A list of one tensor of the shape of `at` per column.
"""
