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

else:
    import jax

    def gradients_of(
        function: Callable[[list[Tensor]], tuple[Tensor, Any]],
        at: Sequence[Tensor],
    ) -> tuple[list[Tensor], Any]:
        return jax.grad(function, has_aux=True)(list(at))


gradients_of.__doc__ = """Gradients of a scalar function, themselves differentiable.

Args:
    function: Callable that takes the list `at` and returns `(value, auxiliary)`, with a
        scalar `value`.
    at: Tensors at which the derivative is taken.

Returns:
    `(gradients, auxiliary)`: one gradient per tensor of `at` (zero where `value` does
    not depend on it), and what `function` returned beside the value.
"""
