"""`tf.data` pipelines; JAX trains on `keras.utils.PyDataset` instead."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def endless_dataset(batch: Callable[[int], Any]) -> Any:
        """Returns the infinite `tf.data.Dataset` of `batch(0)`, `batch(1)`, ...

        Args:
            batch: Function from the number of a batch to nested tuples of arrays, whose
                shapes and dtypes do not depend on the number.
        """
        signature = keras.tree.map_structure(
            lambda array: tf.TensorSpec(array.shape, array.dtype), batch(0)
        )
        return tf.data.Dataset.from_generator(
            lambda: map(batch, itertools.count()), output_signature=signature
        ).prefetch(tf.data.AUTOTUNE)

else:

    def endless_dataset(batch: Callable[[int], Any]) -> Any:
        """Raises: `tf.data` is TensorFlow's."""
        del batch
        raise RuntimeError(
            "A tf.data.Dataset needs the TensorFlow backend. Received: "
            f"backend={keras.backend.backend()!r}. Take a keras.utils.PyDataset."
        )
