"""The only rooms that import TensorFlow or JAX by name, and the check that one is there.

`import nsl_keras` needs Keras 3 and one of the two backends. Without them it ends in an
`ImportError` that says what to install, instead of in a traceback through Keras.
"""

from __future__ import annotations

from types import ModuleType

SUPPORTED_BACKENDS = ("tensorflow", "jax")

_INSTALL = (
    "Install one with the package: "
    '`pip install "nsl_keras[tensorflow]"` (or `[tensorflow-cpu]`, '
    "`[tensorflow-cuda]`, `[jax]`), and select JAX with KERAS_BACKEND=jax."
)


def require_backend() -> ModuleType:
    """Imports Keras and returns it.

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
    return keras


require_backend()
