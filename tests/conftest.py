import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")

import keras
import pytest


def pytest_collection_finish():
    # `clear_session` collects garbage after every test: let it not look through what the
    # imports made, which stays anyway.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_seed():
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.backend.clear_session()


@pytest.fixture
def one_thread():
    """Keeps scikit-learn to one thread: waiting for others takes longer than its work."""
    from threadpoolctl import threadpool_limits  # Comes with scikit-learn.

    with threadpool_limits(1):
        yield
