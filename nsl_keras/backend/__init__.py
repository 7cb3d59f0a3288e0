"""What the package asks of TensorFlow or JAX, under one name for both.

`backend/jax.py` has the functions of `backend/tensorflow.py` and, for several replicas, of
`backend/distribution.py`. `import nsl_keras` needs Keras 3 and one of the two; without
them it ends in an `ImportError` that says what to install.
"""

from __future__ import annotations

from typing import TypeAlias

SUPPORTED_BACKENDS = ("tensorflow", "jax")

_INSTALL = (
    "Install one with the package: "
    '`pip install "nsl_keras[tensorflow]"` (or `[tensorflow-cpu]`, '
    "`[tensorflow-cuda]`, `[jax]`), and select JAX with KERAS_BACKEND=jax."
)


def require_backend() -> None:
    """Imports Keras.

    Raises:
        ImportError: If Keras or the backend that Keras is configured for is not
            installed, or if that backend is neither TensorFlow nor JAX.
    """
    try:
        import keras
    except ModuleNotFoundError as error:
        raise ImportError(
            "`nsl_keras` needs Keras 3 with an installed backend "
            f"(TensorFlow or JAX), and could not import {error.name!r}. {_INSTALL}"
        ) from error
    major = int(keras.__version__.split(".")[0])
    if major < 3:
        raise ImportError(
            f"`nsl_keras` needs Keras 3. Received: keras=={keras.__version__}. "
            "Unset TF_USE_LEGACY_KERAS and upgrade keras."
        )
    if keras.backend.backend() not in SUPPORTED_BACKENDS:
        raise ImportError(
            "The Keras backend must be one of "
            f"{', '.join(SUPPORTED_BACKENDS)} for `nsl_keras`. "
            f"Received: backend={keras.backend.backend()!r}. {_INSTALL}"
        )


require_backend()

import keras  # noqa: E402

if keras.backend.backend() == "tensorflow":
    from nsl_keras.backend.distribution import (
        ReplicatedSteps,
        counted,
        is_first_process,
        on_all_replicas,
        start_workers,
        weighed,
    )
    from nsl_keras.backend.tensorflow import (
        BackendTensor,
        GradientTape,
        apart,
        assert_in_graph,
        at_any_batch_size,
        compiled,
        endless_dataset,
        fused_batch_normalization,
        gradients_of,
        gradients_of_columns,
        is_known,
        largest,
        map_elements,
        max_pooling,
        outside_traces,
        require_shapes,
        sum_in_loop,
        variable_scope,
    )
else:
    from nsl_keras.backend.jax import (
        BackendTensor,
        GradientTape,
        ReplicatedSteps,
        apart,
        assert_in_graph,
        at_any_batch_size,
        compiled,
        counted,
        endless_dataset,
        fused_batch_normalization,
        gradients_of,
        gradients_of_columns,
        is_first_process,
        is_known,
        largest,
        map_elements,
        max_pooling,
        on_all_replicas,
        outside_traces,
        require_shapes,
        start_workers,
        sum_in_loop,
        variable_scope,
        weighed,
    )

#: What layers and functions compute with: a tensor of the backend, or a symbolic one.
Tensor: TypeAlias = keras.KerasTensor | BackendTensor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Returns a tensor in float32, or a wider float; integers as floats."""
    tensor = keras.ops.convert_to_tensor(tensor)
    if keras.backend.is_float_dtype(tensor.dtype):
        dtype = keras.backend.result_type(tensor.dtype, "float32")
    else:
        dtype = keras.backend.result_type(keras.config.floatx(), "float32")
    return keras.ops.cast(tensor, dtype)


def begin_fit_at(model: keras.Model, epoch: int) -> None:
    """Lets the `fit` that called `on_train_begin` begin at another epoch.

    Keras has no public way: `keras.callbacks.BackupAndRestore` sets the same attribute.
    Keras never takes it back, so that later calls of `fit` begin there too: call again
    with 0 once `fit` has begun.

    Args:
        model: The model in training.
        epoch: The number of the epoch, from 0; 0 for what `fit` was given.
    """
    model._initial_epoch = epoch


__all__ = [
    "BackendTensor",
    "GradientTape",
    "ReplicatedSteps",
    "Tensor",
    "apart",
    "assert_in_graph",
    "at_any_batch_size",
    "at_least_float32",
    "begin_fit_at",
    "compiled",
    "counted",
    "endless_dataset",
    "fused_batch_normalization",
    "gradients_of",
    "gradients_of_columns",
    "is_first_process",
    "is_known",
    "largest",
    "map_elements",
    "max_pooling",
    "on_all_replicas",
    "outside_traces",
    "require_backend",
    "require_shapes",
    "start_workers",
    "sum_in_loop",
    "variable_scope",
    "weighed",
]
