"""Data checks inside a step, where the backend can make them.

TensorFlow checks in eager mode and in graphs. XLA drops assertions, and JAX has none
under `jit`: there `MetaNeighborhoodModel.fit` stops at the first non-finite loss instead.
"""

from __future__ import annotations

from typing import Any

import keras

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def assert_true(condition: Any, message: str) -> None:
        """Raises `tf.errors.InvalidArgumentError` when a Boolean tensor is false."""
        tf.debugging.Assert(condition, [message])

else:

    def assert_true(condition: Any, message: str) -> None:
        """Does nothing: JAX has no assertion that survives `jit`."""
        del condition, message
