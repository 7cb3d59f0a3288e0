"""Imports with the wrong backend or none, and the private names behind `backend`."""

import inspect

import keras
import numpy as np
import pytest
from helpers import IS_TENSORFLOW, run_python

from nsl_keras import backend

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

attempt(keras=None)
backend = types.SimpleNamespace(backend=lambda: "torch")
attempt(keras=types.SimpleNamespace(backend=backend))
attempt(tensorflow=None)
"""


def test_a_missing_backend_is_named():
    printed = run_python("-c", MISSING, KERAS_BACKEND="tensorflow")
    for line, message in zip(
        printed.splitlines(),
        (
            "could not import 'keras'",
            "must be one of tensorflow, jax for `nsl_keras`. Received: backend='torch'",
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


# Private names: a test fails when Keras or TensorFlow change one.


def test_keras_begins_every_fit_where_a_backup_resumed(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((2, 2)), np.ones((2, 1))
    for epochs in (1, 2):
        kept = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
        model.fit(x, y, epochs=epochs, callbacks=[kept], verbose=0)
    assert model.fit(x, y, verbose=0).epoch == []
    backend.forget_initial_epoch(model)
    assert model.fit(x, y, verbose=0).epoch == [0]


@pytest.mark.skipif(not IS_TENSORFLOW, reason="Names of TensorFlow and its trainer")
def test_private_names_of_tensorflow():
    import tensorflow as tf

    function = backend.not_inlined(lambda x: x + 1).get_concrete_function(tf.zeros(2))
    assert function.function_def.attr["_noinline"].b
    parameters = inspect.signature(keras.Model._maybe_symbolic_build).parameters
    assert list(parameters) == ["self", "iterator", "data_batch"]
