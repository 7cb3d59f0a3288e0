"""Values that are needed at once, also while a step is being traced.

`fit` builds layers that are not built yet inside the graph or trace of its step.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras

Tensor = Any

if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    def outside_traces() -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which operations run at once, in graphs too."""
        return tf.init_scope()

    def is_known(tensor: Tensor) -> bool:
        """Whether a tensor has its value already: it is not part of a graph."""
        return not tf.is_symbolic_tensor(tensor)

else:
    import jax

    def outside_traces() -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which operations on constants run at once."""
        return jax.ensure_compile_time_eval()

    def is_known(tensor: Tensor) -> bool:
        """Whether a tensor has its value already: it is not being traced."""
        return not isinstance(tensor, jax.core.Tracer)
