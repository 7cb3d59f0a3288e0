"""How many replicas share a step."""

from __future__ import annotations

import keras

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def replicas_in_sync() -> int:
        """Returns the number of replicas of the current `tf.distribute` strategy."""
        return tf.distribute.get_strategy().num_replicas_in_sync

else:

    def replicas_in_sync() -> int:
        """Returns 1: on JAX, Keras's distribution API runs one program."""
        return 1
