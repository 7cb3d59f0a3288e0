import gc
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("MPLBACKEND", "Agg")
# TensorFlow turns oneDNN on by itself on newer processors only; without it, its CPU kernels
# take no channels first.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
# Tests run in several processes, whose threads would wait for each other's.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# XLA compiles for longer than the tests let its code run.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false",
)

import keras
import pytest

TESTS = pathlib.Path(__file__).parent


def pytest_configure(config):
    # `eager` leaves the functions of tf.data as they are, which TensorFlow warns about.
    config.addinivalue_line(
        "filterwarnings", "ignore:Even though the `tf.config:UserWarning"
    )


def pytest_collection_modifyitems(items):
    # Examples and experiments take longer than `make test` may.
    for item in items:
        if not item.path.is_relative_to(TESTS):
            item.add_marker("long")


def pytest_collection_finish():
    # What the imports made stays anyway: the garbage collector need not look through it.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed():
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.config.set_image_data_format("channels_last")
    # A garbage collection after every test would take longer than most tests.
    keras.utils.clear_session(free_memory=False)


@pytest.fixture
def float64(fixed_seed):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


@pytest.fixture(autouse=True, scope="module")
def free_memory():
    yield
    keras.utils.clear_session()


@pytest.fixture(autouse=True)
def close_figures():
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def eager():
    """Runs `fit` and `predict` without graphs, which take longer to trace than to run.

    A whole file: `pytestmark = pytest.mark.usefixtures("eager")`.
    """
    if keras.backend.backend() != "tensorflow":
        yield
        return
    import tensorflow as tf

    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.fixture
def large_batches(monkeypatch):
    """Code that need only run takes few steps: arrays are one batch, or a few of 512."""

    def patch(name):
        method = getattr(keras.Model, name)

        def called(self, x, *others, **options):
            if not others[1:] and hasattr(x, "shape"):
                options["batch_size"] = 512
            return method(self, x, *others, **options)

        monkeypatch.setattr(keras.Model, name, called)

    for name in ("fit", "evaluate", "predict"):
        patch(name)


@pytest.fixture
def one_thread():
    """Keeps scikit-learn to one thread: waiting for others takes longer than its work."""
    from threadpoolctl import threadpool_limits  # Comes with scikit-learn.

    with threadpool_limits(1):
        yield
