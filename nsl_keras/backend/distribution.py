"""How many replicas share a step, and where their variables are made."""

from __future__ import annotations

import contextlib
from typing import Any

import keras

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def replicas_in_sync() -> int:
        """Returns the number of replicas of the current `tf.distribute` strategy."""
        return tf.distribute.get_strategy().num_replicas_in_sync

    def variable_scope(model: keras.Model) -> contextlib.AbstractContextManager[Any]:
        """Returns the scope of the strategy that a model was made under."""
        return model.distribute_strategy.scope()

else:

    def replicas_in_sync() -> int:
        """Returns 1: on JAX, Keras's distribution API runs one program."""
        return 1

    def variable_scope(model: keras.Model) -> contextlib.AbstractContextManager[Any]:
        """Returns a scope that does nothing."""
        del model
        return contextlib.nullcontext()
