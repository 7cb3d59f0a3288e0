"""Training on replicas: two devices or two processes train as one device does."""

import concurrent.futures
import json
import os
import pathlib
import socket

import numpy as np
import pytest
from helpers import run_python

#: Seconds for the trainings of one process, far less on a quiet machine.
LONGEST = 600


def found_by(script, **environment):
    """What a script of this folder prints in its last line."""
    path = pathlib.Path(__file__).parent / script
    return json.loads(run_python(path, timeout=LONGEST, **environment).splitlines()[-1])


def on_tensorflow(**environment):
    return found_by("distributed_training.py", KERAS_BACKEND="tensorflow", **environment)


def from_workers():
    sockets = [socket.create_server(("localhost", 0)) for _ in range(2)]
    workers = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()

    def train(index):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": workers}, "task": task})
        return on_tensorflow(TF_CONFIG=config)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(train, range(2)))


def assert_equal(one, several):
    assert {"neighborhoods", "maml"} <= set(several) <= set(one)
    for name, trained in several.items():
        assert len(trained["loss"]) == 2
        assert set(trained) == set(one[name])
        for part, values in trained.items():
            atol = 1e-4 if part == "predictions" else 1e-5
            np.testing.assert_allclose(
                values, one[name][part], rtol=1e-5, atol=atol, err_msg=f"{name} {part}"
            )


@pytest.mark.long
@pytest.mark.timeout(2 * LONGEST)
def test_replicas_and_workers_equal_one_device():
    found = on_tensorflow()
    assert "adapted" in found["several"]
    assert_equal(found["one"], found["several"])
    # The mean of the replicas' means, as in Keras.
    np.testing.assert_allclose(*found["uneven"], rtol=1e-5, atol=1e-5)
    first, second = from_workers()
    for worker in (first, second):
        assert_equal(found["one"], worker["several"])
    assert first["drawn"] == second["drawn"]


@pytest.mark.long
def test_jax_devices():
    pytest.importorskip("jax")
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    options = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    found = found_by("jax_distribution.py", **options)
    # Batches in halves, and half of the entries on each device: keys of 16 floats, values
    # of 8.
    assert found["difference"] < 1e-5
    assert found["bytes"] == {"keys": [4 * 16 * 500] * 4, "value_logits": [4 * 8 * 500] * 4}
    assert "P('model', None)" in found["page"]
