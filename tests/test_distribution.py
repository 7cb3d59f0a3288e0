"""`tf.distribute`: two replicas train as one device does, and report the same losses."""

import json
import os
import subprocess
import sys

import pytest

# Each strategy in a process of its own: several in one can dead-lock.
SCRIPT = """
import json, sys
import numpy as np
import tensorflow as tf

mode = sys.argv[1]
if mode == "mirrored":
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 2
else:
    strategy = tf.distribute.get_strategy()

import keras
import nsl_keras

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x = rng.normal(size=(80, 8, 8, 1)).astype("float32")
y = rng.integers(0, 3, size=80)
with strategy.scope():
    backbone = keras.Sequential([
        keras.Input((8, 8, 1)),
        nsl_keras.layers.NeuralSimilarityConv2D(4, 3, activation="relu"),
        nsl_keras.layers.BatchNormalization(synchronized=True),
        nsl_keras.layers.NeuralSimilarityConv2D(
            3, 3, predictor=nsl_keras.predictors.SimilarityPredictor(synchronized=True)),
        keras.layers.Flatten(),
        keras.layers.Dense(6),
    ])
    model = nsl_keras.MetaNeighborhoodModel(
        backbone, nsl_keras.layers.CosineDense(3),
        nsl_keras.layers.NeighborDictionary(12, dropout=0.0))
    model.compile(
        keras.optimizers.SGD(0.002, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"])
losses = []
class Record(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        losses.append(float(logs["loss"]))
# 5 global batches of 16 an epoch: 20 steps.
history = model.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0,
                    callbacks=[Record()]).history
found = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
print(json.dumps({
    "losses": losses, "history": history, "evaluation": found,
    "weights": [np.asarray(v.value).ravel().tolist() for v in model.variables
                if v.dtype == "float32"],
}))
"""


def train(mode):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def largest_difference(first, second):
    assert len(first) == len(second)
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


@pytest.mark.long
def test_two_replicas_equal_one_device():
    one, two = train("none"), train("mirrored")
    assert len(one["losses"]) == 20
    assert largest_difference(one["losses"], two["losses"]) < 1e-5
    assert one["weights"].count([20.0]) == 3  # The steps of the batch norms.
    for weights, others in zip(one["weights"], two["weights"], strict=True):
        assert largest_difference(weights, others) < 1e-5
    assert set(one["history"]) == {"loss", "accuracy", "unadapted_accuracy"}
    for part in ("history", "evaluation"):
        for key, value in one[part].items():
            values = [value, two[part][key]]
            first, second = (v if isinstance(v, list) else [v] for v in values)
            assert largest_difference(first, second) < 1e-5, key
