"""Importing the package with the wrong backend, or with none."""

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
