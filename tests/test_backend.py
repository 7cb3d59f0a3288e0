"""Importing the package with the wrong backend, or with none."""

import os
import subprocess
import sys
import types

import keras
import pytest

from nsl_keras.backend import is_first_process


def import_with(script, **environment):
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
    )


MISSING = "import sys; sys.modules[{!r}] = None; import nsl_keras"
FAKE = """
import sys, types
keras = types.ModuleType("keras")
keras.__version__ = {!r}
keras.backend = types.SimpleNamespace(backend=lambda: "torch")
sys.modules["keras"] = keras
import nsl_keras
"""


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            MISSING.format("tensorflow"),
            "needs Keras 3 and TensorFlow or JAX, and could not import 'tensorflow",
        ),
        pytest.param(
            MISSING.format("keras"), "could not import 'keras'", marks=pytest.mark.long
        ),
        pytest.param(
            FAKE.format("3.15.0"),
            "must be one of tensorflow, jax for `nsl_keras`. Received: backend='torch'",
            marks=pytest.mark.long,
        ),
        pytest.param(
            FAKE.format("2.15.0"),
            "needs Keras 3. Received: keras==2.15",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_missing_backend_is_named(script, message):
    result = import_with(script, KERAS_BACKEND="tensorflow")
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError") and message in last


@pytest.mark.long
def test_jax_trains_without_tensorflow():
    """Layers and model, with any import of TensorFlow made to fail."""
    script = """
import sys
sys.modules["tensorflow"] = None
import functools
import keras, numpy as np
import nsl_keras
x = np.random.default_rng(0).normal(size=(16, 8, 8, 1)).astype("float32")
y = np.arange(16) % 3
convolution = functools.partial(
    nsl_keras.layers.NeuralSimilarityConv2D, predictor="sphere")
backbone = nsl_keras.convert.add_film(
    nsl_keras.backbones.convnet4((8, 8, 1), 4, convolution), dictionary_size=3)
model = nsl_keras.MetaNeighborhoodModel(
    backbone, nsl_keras.layers.CosineDense(3), dictionary=10)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
              metrics=["accuracy"])
history = model.fit(x, y, epochs=2, verbose=0).history
assert sorted(history) == ["accuracy", "loss", "unadapted_accuracy"], history
assert np.all(np.isfinite(history["loss"]))
assert model.predict(x, verbose=0).shape == (16, 3)
x[3] = np.nan
def bad():
    while True:
        yield x, y
try:
    model.fit(bad(), steps_per_epoch=2, shuffle=False, verbose=0)
except nsl_keras.NonFiniteLossError as error:
    print("stopped:", error)
print(sys.modules["tensorflow"])
"""
    result = import_with(script, KERAS_BACKEND="jax")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "stopped: The loss became nan by batch 1 of epoch 1" in result.stdout
    assert result.stdout.splitlines()[-1] == "None"


@pytest.mark.parametrize(
    ("task", "jobs", "first"),
    [
        (None, (), True),
        (("worker", 0), ("worker",), True),
        (("worker", 1), ("worker",), False),
        (("worker", 0), ("chief", "worker"), False),
        (("chief", 0), ("chief", "worker"), True),
        (("evaluator", 0), ("chief", "evaluator"), False),
    ],
    ids=str,
)
@pytest.mark.skipif(keras.backend.backend() == "jax", reason="Strategies of TensorFlow")
def test_the_first_process_writes(task, jobs, first):
    resolver = task and types.SimpleNamespace(
        task_type=task[0],
        task_id=task[1],
        cluster_spec=lambda: types.SimpleNamespace(jobs=list(jobs)),
    )
    strategy = types.SimpleNamespace(cluster_resolver=resolver)
    model = types.SimpleNamespace(distribute_strategy=strategy)
    assert is_first_process(model) is first
