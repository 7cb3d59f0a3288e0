"""Functions of tensors that are compiled once for each shape of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def compiled(function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        """Returns the function as a graph, through XLA if `jit_compile` says so."""
        return tf.function(function, jit_compile=jit_compile)

else:
    import jax

    def compiled(function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        """Returns the function compiled: JAX knows no other way than XLA."""
        del jit_compile
        return jax.jit(function)
