"""Importing the package with the wrong backend, or with none."""

import pytest
from helpers import run_python

#: Tries to import the package beside missing modules and others in place of Keras.
MISSING = """
import sys, types

def attempt(**modules):
    sys.modules.update(modules)
    try:
        import nsl_keras
    except ImportError as error:
        print(error)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("nsl_keras", "keras"):
            del sys.modules[name]

def fake(version):
    backend = types.SimpleNamespace(backend=lambda: "torch")
    return types.SimpleNamespace(__version__=version, backend=backend)

attempt(keras=None)
attempt(keras=fake("3.15.0"))
attempt(keras=fake("2.15.0"))
attempt(tensorflow=None)
"""


def test_a_missing_backend_is_named():
    printed = run_python("-c", MISSING, KERAS_BACKEND="tensorflow")
    for line, message in zip(
        printed.splitlines(),
        (
            "could not import 'keras'",
            "must be one of tensorflow, jax for `nsl_keras`. Received: backend='torch'",
            "needs Keras 3. Received: keras==2.15",
            "needs Keras 3 and TensorFlow or JAX, and could not import 'tensorflow",
        ),
        strict=True,
    ):
        assert message in line


#: What a learner returns in float64, and whether an inner loop rounds to float32.
FLOAT64 = """
import keras, nsl_keras
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
x = keras.ops.ones((1, 2, 6, 6, 1))
network = keras.Sequential([keras.Input((6, 6, 1)), keras.layers.Flatten()])
learner = nsl_keras.few_shot.NeighborhoodLearner(network, ways=2)
head = nsl_keras.layers.MetaNeighborhoodHead(keras.layers.Dense(3), 7)
z = keras.ops.ones((1, 4))
change = head(z * (1 + 1e-12)) - head(z)
print(learner((x, keras.ops.array([[0, 1]]), x)).dtype, float(abs(change).max()) > 0)
"""


@pytest.mark.long
def test_float64_on_jax():
    printed = run_python("-c", FLOAT64, KERAS_BACKEND="jax", JAX_ENABLE_X64="1")
    assert printed.split() == ["float64", "True"]
