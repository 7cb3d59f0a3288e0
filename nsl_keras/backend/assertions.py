"""Data checks inside a step, where the backend can make them.

TensorFlow checks in eager mode and in graphs. XLA drops assertions, and JAX has none
under `jit`: there `fit` of this package's models stops at the first non-finite loss
instead.
"""

from __future__ import annotations

from typing import Any

import keras

Tensor = Any

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def checked(tensor: Tensor, condition: Tensor, *message: Any) -> Tensor:
        """Returns `tensor`, which in a graph waits for the check of `condition`.

        Whatever is computed from it, weight updates included, happens only if the check
        holds.

        Args:
            tensor: What depends on the check.
            condition: Boolean scalar.
            *message: Strings, numbers and tensors that the error shows one by one.

        Raises:
            tf.errors.InvalidArgumentError: If `condition` is false.
        """
        with tf.control_dependencies([tf.debugging.Assert(condition, list(message))]):
            return tf.identity(tensor)

else:

    def checked(tensor: Tensor, condition: Tensor, *message: Any) -> Tensor:
        """Returns `tensor`: JAX has no assertion that survives `jit`."""
        del condition, message
        return tensor
