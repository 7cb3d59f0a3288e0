"""Importing the package with the wrong backend, or with none."""

import os
import subprocess
import sys
import types

import keras
import numpy as np
import pytest

from nsl_keras import backend
from nsl_keras.backend import begin_fit_at, is_first_process


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
    assert "stopped: The loss became nan by batch 1 of epoch 1" in result.stdout
    assert result.stdout.splitlines()[-1] == "None"


@pytest.mark.parametrize(
    ("pool_size", "strides", "padding"),
    [((2, 2), (2, 2), "valid"), ((3, 2), (2, 1), "same")],
)
def test_max_pooling_and_its_derivatives(pool_size, strides, padding):
    wide = keras.backend.backend() == "tensorflow"
    dtype, step, tolerance = ("float64", 1e-6, 1e-7) if wide else ("float32", 1e-2, 5e-2)
    rng = np.random.default_rng(0)
    # No ties, and none within the steps of the differences.
    images = (rng.permutation(2 * 5 * 6 * 3).reshape(2, 5, 6, 3) / 20).astype(dtype)
    layer = keras.layers.MaxPooling2D(pool_size, strides, padding, dtype=dtype)
    weights = rng.normal(size=layer(images).shape).astype(dtype)
    direction = rng.normal(size=images.shape).astype(dtype)

    def pooled(images):
        return backend.max_pooling(images, pool_size, strides, padding)

    def gradient(pooling, images):
        def total(at):
            return keras.ops.sum(weights * pooling(at[0]) ** 3), None

        return backend.gradients_of(total, [images])[0][0]

    def second(pooling, images):
        def total(at):
            return keras.ops.sum(direction * gradient(pooling, at[0])), None

        return backend.gradients_of(total, [images])[0][0]

    def numbers(tensor):
        return keras.ops.convert_to_numpy(tensor)

    np.testing.assert_array_equal(numbers(pooled(images)), numbers(layer(images)))
    for derivative in (gradient, second):
        np.testing.assert_allclose(
            numbers(derivative(pooled, images)),
            numbers(derivative(layer, images)),
            rtol=1e-6,
        )
    shift = rng.normal(size=images.shape).astype(dtype)
    above, below = (
        np.sum(direction * numbers(gradient(pooled, images + sign * step * shift)))
        for sign in (1, -1)
    )
    received = np.sum(shift * numbers(second(pooled, images)))
    np.testing.assert_allclose(received, (above - below) / (2 * step), rtol=tolerance)
    # Where there are ties, the gradient is Keras's too.
    tied = np.round(images % 2).astype(dtype)
    np.testing.assert_allclose(
        numbers(gradient(pooled, tied)), numbers(gradient(layer, tied)), rtol=1e-6
    )


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


def test_fit_begins_where_a_callback_says():
    """No public way leads there: this fails when Keras's own changes."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.ones((4, 2), "float32")
    begin = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: begin_fit_at(model, 2),
        on_epoch_begin=lambda epoch, logs: begin_fit_at(model, 0),
    )
    history = model.fit(x, x[:, :1], epochs=4, callbacks=[begin], verbose=0)
    assert history.epoch == [2, 3]
    assert model.fit(x, x[:, :1], epochs=1, verbose=0).epoch == [0]
