"""First derivatives that can be differentiated once more, on either backend.

TensorFlow records them on a `GradientTape`, JAX traces them with `jax.grad`; the code
above this module sees one function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

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

    def lost_second_derivatives(
        function: Callable[[list[Tensor]], list[Tensor]], at: Sequence[Tensor]
    ) -> float:
        at = [tf.convert_to_tensor(tensor) for tensor in at]
        random = np.random.default_rng(0)
        try:
            with tf.GradientTape(watch_accessed_variables=False) as outer:
                with tf.GradientTape(watch_accessed_variables=False) as inner:
                    inner.watch(at)
                    outputs = function(at)
                    weights = [
                        tf.cast(random.normal(size=each.shape), each.dtype)
                        for each in outputs
                    ]
                    outer.watch(weights)
                    value = sum(
                        tf.reduce_sum(tf.cast(weight * output, "float64"))
                        for weight, output in zip(weights, outputs, strict=True)
                    )
                found = [
                    tf.cast(tf.convert_to_tensor(each), "float64")
                    for each in inner.gradient(value, at)
                    if each is not None
                ]
                norms = [float(tf.reduce_sum(tf.square(each))) for each in found]
                found = [each for each, norm in zip(found, norms, strict=True) if norm]
                norms = [norm for norm in norms if norm]
                # The gradients are linear in the weights: by Euler's theorem each term
                # is what its own derivative along the weights comes to, which is 1.
                total = sum(
                    tf.reduce_sum(each * tf.stop_gradient(each)) / norm
                    for each, norm in zip(found, norms, strict=True)
                )
            if not found:
                return 0.0
            derivatives = outer.gradient(
                total, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
        except LookupError:  # TensorFlow's answer for some operations.
            return float("inf")
        kept = sum(
            tf.reduce_sum(tf.cast(weight * derivative, "float64"))
            for weight, derivative in zip(weights, derivatives, strict=True)
        )
        return abs(len(found) - float(kept))

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

    def lost_second_derivatives(
        function: Callable[[list[Tensor]], list[Tensor]], at: Sequence[Tensor]
    ) -> float:
        del function, at
        return 0.0  # JAX differentiates again, or raises.


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

lost_second_derivatives.__doc__ = """Measures what a second differentiation would lose.

TensorFlow returns no gradient, without an error, where the gradient of an operation has
itself no gradient. Call this where operations run at once.

Args:
    function: Callable from the list `at` to a list of floating-point tensors.
    at: Tensors at which the derivatives are taken.

Returns:
    The sum of the shares of the gradients, one for each tensor of `at`, that
    differentiating them again does not reach: 0 to rounding if all is well.
"""
