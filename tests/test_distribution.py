"""Training on replicas: two devices or two processes train as one device does."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest
from helpers import run_python

import nsl_keras
from nsl_keras.distribution import DistributedModel, distribute

TESTS = pathlib.Path(__file__).parent
TRAINING = str(TESTS / "distributed_training.py")

#: Seconds for the trainings of one process, far less on a quiet machine.
LONGEST = 600


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("localhost", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def tf_config(ports, index):
    workers = [f"localhost:{port}" for port in ports]
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": workers}, "task": task})


def start(*arguments, **environment):
    """A process of Python; those of Keras and TensorFlow are quiet."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=TESTS.parent,
        env={
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": str(TESTS.parent),
            **environment,
        },
    )


@contextlib.contextmanager
def none_left_of(processes):
    """Kills the processes at the end, whatever happened."""
    with contextlib.ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            stack.callback(process.kill)  # Before the process's own exit, which waits.
        yield


def last_lines(processes, timeout=290):
    found = []
    with none_left_of(processes):
        for process in processes:
            output, errors = process.communicate(timeout=timeout)
            assert process.returncode == 0, errors[-3000:]
            found.append(json.loads(output.splitlines()[-1]))
    return found


def start_workers(*arguments):
    ports = free_ports(2)
    return [start(*arguments, TF_CONFIG=tf_config(ports, index)) for index in range(2)]


def largest_difference(first, second):
    """Of numbers below 1 the absolute difference, of larger ones the relative one."""
    scale = np.maximum(np.abs(first), 1)
    return float(np.max(np.abs(np.subtract(first, second)) / scale))


def differences(first, second):
    """The largest differences of losses, of weights, of predictions, and of metrics."""
    metrics = [
        (first[part][key], second[part][key])
        for part in ("history", "evaluation")
        for key in first[part]
    ]
    return {
        "losses": largest_difference(first["losses"], second["losses"]),
        "weights": max(map(largest_difference, first["weights"], second["weights"])),
        "predictions": largest_difference(first["predictions"], second["predictions"]),
        "metrics": max(largest_difference(*pair) for pair in metrics),
    }


#: In these, each step rounds; and an accuracy is of 16 images.
ROUGH = {"losses": 0.01, "weights": 0.01, "predictions": 0.05, "metrics": 0.13}
FINE = {"losses": 1e-5, "weights": 1e-5, "predictions": 1e-4, "metrics": 1e-5}


HALF_PRECISION = ("bfloat16", "float16")
EPOCHS = 2  # Of five steps.


@pytest.mark.long
@pytest.mark.timeout(2 * LONGEST)
def test_replicas_and_workers_equal_one_device():
    (found,) = last_lines([start(TRAINING)], LONGEST)
    one, mirrored = found["one"], found["mirrored"]
    assert set(one) == {"plain", "neighborhoods", "maml", *HALF_PRECISION}
    assert_equal(one, mirrored, one)
    # Overflows in one replica have halved the scale on all, once an epoch.
    assert one["float16"]["scale"] == 2**15 / 2**EPOCHS
    assert mirrored["float16"]["scale"] == one["float16"]["scale"]
    check_refusals(found["refused"])
    names = ("plain", "neighborhoods")
    first, second = last_lines(start_workers(TRAINING, *names), LONGEST)
    for worker in (first, second):
        assert_equal(one, worker["workers"], names)
    assert first["drawn"] == second["drawn"]


def assert_equal(one, several, names):
    assert set(several) == set(names)
    for name in names:
        assert len(one[name]["losses"]) == 5 * EPOCHS
        assert set(one[name]["history"]) == set(several[name]["history"])
        assert len(one[name]["weights"]) == len(several[name]["weights"])
        found = differences(one[name], several[name])
        allowed = ROUGH if name in HALF_PRECISION else FINE
        for part, difference in found.items():
            assert difference < allowed[part], (name, found)


def check_refusals(found):
    assert len(found["reductions"]) == 4
    for error in found["reductions"]:
        assert error.startswith("`loss` must be the mean over the examples on several")
    assert "`gradient_accumulation_steps` must be None" in found["accumulating"]
    assert found["moved"] > 0
    assert found["frozen"] > 0  # With nothing left to train, `fit` goes on.
    assert found["on_batch"] > 0
    assert found["predicted"] == [[1, 2], [3, 2]]


KILLED = """
import nsl_keras
strategy = nsl_keras.distribution.multi_worker_strategy(timeout=60)
import keras
import numpy as np
with strategy.scope():
    model = nsl_keras.distribution.distribute(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]))
    model.compile("sgd", "mse")
said = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: print("a step", flush=True))
model.fit(np.ones((8, 4)), np.ones((8, 2)), batch_size=4, epochs=10**6, verbose=0,
          callbacks=[said])
"""


@pytest.mark.long
def test_the_others_end_when_a_worker_is_killed():
    workers = start_workers("-c", KILLED)
    with none_left_of(workers):
        for worker in workers:
            assert worker.stdout.readline() == "a step\n"
        workers[1].send_signal(signal.SIGKILL)
        _, errors = workers[0].communicate(timeout=120)
    assert workers[0].returncode not in (0, None)
    assert "/job:worker/replica:0/task:1" in errors


@pytest.mark.parametrize("text", ["", '{"cluster"', "[]", '{"cluster": {"ps": ["a:1"]}}'])
def test_malformed_cluster(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match="variable `TF_CONFIG` must hold the addresses"):
        nsl_keras.distribution.multi_worker_strategy()
    with pytest.raises(ValueError, match="`timeout` must be a finite number above zero"):
        nsl_keras.distribution.multi_worker_strategy(timeout=0)


MISSING = """
import nsl_keras
nsl_keras.distribution.multi_worker_strategy(timeout=2)
"""


@pytest.mark.long
def test_a_process_ends_when_a_worker_is_missing():
    ports = free_ports(2)
    with start("-c", MISSING, TF_CONFIG=tf_config(ports, 0)) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    addresses = f"localhost:{ports[0]}, localhost:{ports[1]}"
    assert f"Worker 0 waits for {addresses}: within 2 seconds" in errors
    assert "Timeout (0:00:02)!" in errors


class Untouched(keras.Model):
    """A subclassed model that knows neither `training` nor masks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        return self.dense(inputs["a"]) + inputs["b"]


def test_distribute_shares_the_layers():
    network = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    )
    model = distribute(network)
    assert isinstance(model, DistributedModel)
    assert model.built
    model.compile("sgd", "mse")
    x = np.ones((8, 3), "float32")
    before = network.get_weights()
    model.fit(x, np.ones((8, 2)), verbose=0)
    assert not np.array_equal(before[0], network.get_weights()[0])
    np.testing.assert_allclose(
        model.predict(x, verbose=0), network.predict(x, verbose=0), atol=1e-6
    )
    # Dropout knows whether this is training.
    assert np.ptp(np.asarray(model(x, training=True))[:, 0]) > 0
    assert distribute(model) is model
    ours = nsl_keras.MetaNeighborhoodModel(None, nsl_keras.layers.CosineDense(3), 4)
    assert distribute(ours) is ours


def test_distributed_models_are_exported(tmp_path):
    import tensorflow as tf

    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model = distribute(network)
    model.export(str(tmp_path / "served"), verbose=False)
    x = np.ones((4, 3), "float32")
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(served.serve(x), network.predict(x, verbose=0), atol=1e-6)


def test_distribute_subclassed_models():
    model = distribute(Untouched())
    model.compile("sgd", "mse")
    x = {"a": np.ones((8, 3)), "b": np.ones((8, 2))}
    assert "loss" in model.fit(x, np.ones((8, 2)), verbose=0).history
    assert model.predict(x, verbose=0).shape == (8, 2)


def test_distribute_several_outputs():
    inputs = keras.Input((3,))
    outputs = [keras.layers.Dense(2, name=name)(inputs) for name in ("first", "second")]
    model = distribute(keras.Model(inputs, outputs))
    model.compile("sgd", {"first": "mse", "second": "mae"})
    targets = {"first": np.ones((8, 2)), "second": np.ones((8, 2))}
    found = model.fit(np.ones((8, 3)), targets, verbose=0).history
    assert set(found) == {"loss", "first_loss", "second_loss"}


def test_distributed_model_can_be_saved(tmp_path):
    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model = distribute(network)
    model.compile("adam", "mse")
    model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)
    for saved, kind in ((model, DistributedModel), (model.model, keras.Sequential)):
        saved.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert type(loaded) is kind
        for weights, others in zip(loaded.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(weights, others)
    assert loaded.predict(np.ones((1, 3)), verbose=0).shape == (1, 2)


def test_inputs_reach_the_model_as_they_are():
    """In half precision, years and large numbers of tokens would be rounded."""
    keras.config.set_dtype_policy("mixed_float16")
    layers = keras.layers.Normalization(mean=2020.0, variance=1.0, dtype="float32")
    model = keras.Sequential([keras.Input((1,)), layers])
    keras.config.set_dtype_policy("float32")
    wrapped, years = DistributedModel(model), np.array([[2020.3]], "float32")
    np.testing.assert_array_equal(wrapped(years), model(years))
    wrapped.compile("sgd")
    assert isinstance(wrapped.optimizer, keras.optimizers.LossScaleOptimizer)
    again = keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(wrapped)
    )
    np.testing.assert_array_equal(again(years), model(years))


def test_distribute_refuses():
    class OwnStep(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    with pytest.raises(ValueError, match="'OwnStep' with its own train_step"):
        distribute(OwnStep())
    with pytest.raises(ValueError, match="`model` must be a Keras model"):
        distribute(keras.layers.Dense(2))
    with pytest.raises(ValueError, match="`model` must be a Keras model"):
        DistributedModel(keras.layers.Dense(2))


@pytest.mark.long
def test_jax_devices():
    pytest.importorskip("jax")
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    options = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    found = json.loads(
        run_python(TESTS / "jax_distribution.py", **options).splitlines()[-1]
    )
    # Batches in parts.
    assert found["small"]["difference"] < 1e-5
    # Half of the entries on each device: keys of 16 floats, values of 8.
    assert found["large"]["difference"] < 1e-5
    assert found["large"]["bytes"] == {
        "keys": [4 * 16 * 50_000] * 2,
        "value_logits": [4 * 8 * 50_000] * 2,
    }
    assert "P('model', None)" in found["page"]
