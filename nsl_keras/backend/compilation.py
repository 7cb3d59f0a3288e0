"""Functions of tensors that are compiled: by themselves, or apart in other graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def compiled(function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        """Returns the function as a graph, through XLA if `jit_compile` says so."""
        return tf.function(function, jit_compile=jit_compile)

    def apart(function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function as a graph that stays whole inside other graphs.

        For the gradients in a loop's body: what is put into the graph of a loop has a
        cycle, and there TensorFlow does not see which pooling a gradient belongs to. The
        oneDNN kernel, several times as fast on CPUs, is then left out.
        """
        return tf.function(function, experimental_attributes={"_noinline": True})

else:
    import jax

    def compiled(function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        """Returns the function compiled: JAX knows no other way than XLA."""
        del jit_compile
        return jax.jit(function)

    def apart(function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function: XLA needs no help."""
        return function
