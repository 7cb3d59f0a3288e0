"""Importing the package with the wrong backend, or with none."""

import os
import subprocess
import sys

import pytest


def import_with(script, **environment):
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
    )


@pytest.mark.parametrize("missing", ["tensorflow", "jax", "keras"])
def test_missing_packages_are_named(missing):
    backend = "jax" if missing == "jax" else "tensorflow"
    script = f"import sys; sys.modules[{missing!r}] = None; import nsl_keras"
    result = import_with(script, KERAS_BACKEND=backend)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert "ImportError: `nsl_keras` needs Keras 3 with an installed backend" in last
    assert 'pip install "nsl_keras[tensorflow]"' in last


def test_other_backends_are_refused():
    script = (
        "import sys, types\n"
        "keras = types.ModuleType('keras')\n"
        "keras.__version__ = '3.15.0'\n"
        "keras.backend = types.SimpleNamespace(backend=lambda: 'torch')\n"
        "sys.modules['keras'] = keras\n"
        "import nsl_keras\n"
    )
    result = import_with(script)
    assert "The Keras backend must be one of tensorflow, jax" in result.stderr
    assert "backend='torch'" in result.stderr


def test_keras_2_is_refused():
    script = (
        "import sys, types\n"
        "keras = types.ModuleType('keras')\n"
        "keras.__version__ = '2.15.0'\n"
        "sys.modules['keras'] = keras\n"
        "import nsl_keras\n"
    )
    assert "`nsl_keras` needs Keras 3" in import_with(script).stderr


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
    assert "stopped: The loss became nan in batch 1 of epoch 1" in result.stdout
    assert result.stdout.splitlines()[-1] == "None"
