"""Training on replicas: two devices or two processes train as one device does."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import keras
import numpy as np
import pytest

import nsl_keras
from nsl_keras.distribution import DistributedModel, distribute

TESTS = pathlib.Path(__file__).parents[1]
TRAINING = str(TESTS / "distributed_training.py")

#: Seconds for six trainings, about one minute of a core of a quiet machine.
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
    """What each process printed last."""
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


#: In these, each of the 20 steps rounds; and an accuracy is of 16 images.
ROUGH = {"losses": 0.01, "weights": 0.01, "predictions": 0.05, "metrics": 0.13}
FINE = {"losses": 1e-5, "weights": 1e-5, "predictions": 1e-4, "metrics": 1e-5}


HALF_PRECISION = ("bfloat16", "float16")
FULL_PRECISION = ("plain", "dynamic", "neighborhoods", "maml")


@pytest.mark.long
@pytest.mark.timeout(3 * LONGEST)
def test_replicas_and_workers_equal_one_device():
    (one,) = last_lines([start(TRAINING, "none")], LONGEST)
    assert set(one) == {*FULL_PRECISION, *HALF_PRECISION}
    (mirrored,) = last_lines([start(TRAINING, "mirrored")], LONGEST)
    assert_equal(one, mirrored, one)
    # Overflows in one replica have halved the scale on all, once an epoch.
    assert one["float16"]["scale"] == 2**15 / 2**4
    assert mirrored["float16"]["scale"] == one["float16"]["scale"]
    for worker in last_lines(
        start_workers(TRAINING, "multiworker", *FULL_PRECISION), LONGEST
    ):
        assert_equal(one, worker, FULL_PRECISION)


def assert_equal(one, several, names):
    """Asserts that trainings on several replicas are those on one device."""
    assert set(several) == set(names)
    for name in names:
        assert len(one[name]["losses"]) == 20
        assert set(one[name]["history"]) == set(several[name]["history"])
        assert len(one[name]["weights"]) == len(several[name]["weights"])
        found = differences(one[name], several[name])
        allowed = ROUGH if name in HALF_PRECISION else FINE
        for part, difference in found.items():
            assert difference < allowed[part], (name, found)


REFUSED = """
import json, sys
import numpy as np
import tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
devices = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, devices)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
import keras, nsl_keras
with strategy.scope():
    network = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model = nsl_keras.distribution.distribute(network)
x, y = np.ones((4, 4)), np.ones((4, 2))
found = []
for reduction in ("sum", "mean_with_sample_weight"):
    with strategy.scope():
        model.compile("sgd", keras.losses.MeanSquaredError(reduction=reduction))
    for method in (model.fit, model.evaluate):
        try:
            method(x, y, verbose=0)
        except ValueError as error:
            found.append(str(error))
with strategy.scope():
    model.compile(keras.optimizers.SGD(gradient_accumulation_steps=2), "mse")
try:
    model.fit(x, y, verbose=0)
except ValueError as error:
    accumulating = str(error)
before = model.get_weights()
with strategy.scope():
    model.compile("sgd", "mse", metrics=["mae"])
model.train_on_batch(x, y)
moved = float(np.abs(before[0] - model.get_weights()[0]).max())
model.trainable = False
with strategy.scope():
    model.compile("sgd", "mse")
print(json.dumps({
    "errors": found,
    "accumulating": accumulating,
    "moved": moved,
    "frozen": model.fit(x, y, verbose=0).history["loss"][0],
    "on_batch": model.test_on_batch(x[:1], y[:1], return_dict=True),
    "predicted": [
        model.predict(x[:1], verbose=0).shape, model.predict_on_batch(x[:3]).shape],
}))
"""


@pytest.mark.long
def test_what_does_not_add_up_over_replicas_is_refused():
    (found,) = last_lines([start("-c", REFUSED)])
    assert len(found["errors"]) == 4
    for error in found["errors"]:
        assert error.startswith("`loss` must be the mean over the examples on several")
    assert "`gradient_accumulation_steps` must be None" in found["accumulating"]
    assert found["moved"] > 0
    assert found["frozen"] > 0  # With nothing left to train, `fit` goes on.
    assert found["on_batch"]["loss"] > 0
    assert found["predicted"] == [[1, 2], [3, 2]]


STOCK = """
import json
import numpy as np
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import keras
from nsl_keras.backend.replicas import ReplicatedSteps

class WithStockBuild(ReplicatedSteps):
    _maybe_symbolic_build = keras.Model._maybe_symbolic_build
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
    def call(self, x):
        return self.dense(x)

with strategy.scope():
    model = WithStockBuild()
    model.compile("sgd", "mse")
try:
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    print(json.dumps("it works"))
except ValueError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.long
def test_keras_still_builds_on_a_reduced_batch():
    """Where this fails, `_maybe_symbolic_build` of backend/replicas.py can go."""
    for message in last_lines(start_workers("-c", STOCK)):
        assert "PerReplica" in message


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
    (found,) = last_lines(
        [
            start(
                str(TESTS / "jax_distribution.py"),
                KERAS_BACKEND="jax",
                JAX_PLATFORMS="cpu",
                XLA_FLAGS="--xla_force_host_platform_device_count=2",
            )
        ]
    )
    # Batches in parts: 20 steps of SGD.
    assert found["small"]["difference"] < 1e-5
    # A million entries, half of them on each device: keys of 16 floats, values of 8.
    assert found["large"]["difference"] < 1e-5
    assert found["large"]["bytes"] == {
        "keys": [4 * 16 * 500_000] * 2,
        "value_logits": [4 * 8 * 500_000] * 2,
    }


def test_manifest_of_kubernetes():
    yaml = pytest.importorskip("yaml")
    manifest = TESTS.parent / "examples" / "distributed" / "kubernetes.yaml"
    service, job = yaml.safe_load_all(manifest.read_text())
    spec = job["spec"]["template"]["spec"]
    assert spec["subdomain"] == service["metadata"]["name"]
    (command,) = spec["containers"][0]["args"]
    export, _ = command.split("exec ")
    shown = subprocess.run(
        ["/bin/sh", "-c", export + 'echo "$TF_CONFIG"'],
        capture_output=True,
        text=True,
        check=True,
        env={"JOB_COMPLETION_INDEX": "2"},
    )
    config = json.loads(shown.stdout)
    workers, own = config["cluster"]["worker"], config["task"]["index"]
    assert len(workers) == job["spec"]["completions"]
    name = f"{job['metadata']['name']}-2.{service['metadata']['name']}"
    assert workers[own] == f"{name}:12345"


#: Equal to `train` on one device: in a process of its own, for its random numbers.
ONE_DEVICE = """
import sys
from examples.distributed import ray_train
ray_train.train({"epochs": 1, "batch_size": 64, "weights": sys.argv[1]})
print("{}")
"""


@pytest.mark.long
def test_ray_workers_equal_one_device(tmp_path):
    pytest.importorskip("ray.train")
    h5py = pytest.importorskip("h5py")
    last_lines([start("-c", ONE_DEVICE, str(tmp_path / "one.weights.h5"))])
    command = ("-m", "examples.distributed.ray_train", "--epochs=1")
    with start(*command, f"--storage={tmp_path}") as process:
        output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors[-3000:]
    (written,) = [
        line.removeprefix("Wrote ")
        for line in output.splitlines()
        if line.startswith("Wrote ")
    ]
    compared = []

    def compare(name, one):
        if isinstance(one, h5py.Dataset) and one.dtype.kind == "f":
            compared.append(name)
            np.testing.assert_allclose(two[name], one, atol=1e-5)

    with h5py.File(tmp_path / "one.weights.h5") as first, h5py.File(written) as two:
        first.visititems(compare)
    assert len(compared) > 5


@pytest.mark.long
@pytest.mark.parametrize("case", ["one machine", "several machines", "jax"])
def test_code_of_the_page_runs(case, tmp_path):
    page = (TESTS.parent / "docs" / "guides" / "devices.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 4
    code = "\n".join(blocks[2:] if case == "jax" else blocks[:2])
    environment = {}
    if case == "several machines":
        code, count = re.subn(
            r"^strategy = tf.*\n#.*\n# (strategy = .*)$", r"\1", code, flags=re.M
        )
        assert count == 1
        environment["TF_CONFIG"] = tf_config(free_ports(1), 0)
    there = f"import os; os.chdir({str(tmp_path)!r})\n"
    with start(
        "-c",
        there + code,
        PYTHONWARNINGS="error::UserWarning",
        KERAS_BACKEND="jax" if case == "jax" else "tensorflow",
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        **environment,
    ) as process:
        output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors[-3000:]
    if case == "jax":
        assert "P('model', None)" in output
    else:
        assert (tmp_path / "network.keras").exists()
