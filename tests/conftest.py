import gc
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")
# Without oneDNN, which TensorFlow turns on by itself on newer processors only, its CPU
# kernels take no channels first.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# Tests run in several processes, whose threads would wait for each other's.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# XLA optimizes its code for longer than the tests let it run.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)

import keras
import pytest

from nsl_keras import progress

# No bar among the outputs that tests look at, however slow the machine.
progress.QUIET_SECONDS = float("inf")


def pytest_collection_finish():
    # Let collections of garbage not look through what the imports made: it stays anyway.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seed():
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    # A collection of garbage after every test would take longer than most tests.
    keras.utils.clear_session(free_memory=False)


@pytest.fixture(autouse=True, scope="module")
def _free_memory():
    yield
    keras.utils.clear_session()


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def one_thread():
    """Keeps scikit-learn to one thread: waiting for others takes longer than its work."""
    from threadpoolctl import threadpool_limits  # Comes with scikit-learn.

    with threadpool_limits(1):
        yield
