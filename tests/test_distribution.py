"""Training on replicas: two devices or two processes train as one device does."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
from helpers import run_python

TESTS = pathlib.Path(__file__).parent

#: Seconds for the trainings of one process, far less on a quiet machine.
LONGEST = 600


def start_workers():
    sockets = [socket.create_server(("localhost", 0)) for _ in range(2)]
    workers = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    for index in range(2):
        task = {"type": "worker", "index": index}
        yield subprocess.Popen(
            [sys.executable, TESTS / "distributed_training.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=TESTS.parent,
            env={
                **os.environ,
                "KERAS_BACKEND": "tensorflow",
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "PYTHONPATH": str(TESTS.parent),
                "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task}),
            },
        )


def from_workers():
    workers = list(start_workers())
    try:
        for worker in workers:
            output, errors = worker.communicate(timeout=LONGEST)
            assert worker.returncode == 0, errors[-3000:]
            yield json.loads(output.splitlines()[-1])
    finally:
        for worker in workers:
            worker.kill()


def assert_equal(one, several):
    for name, trained in several.items():
        assert len(trained["losses"]) == 8
        assert set(trained) == set(one[name])
        for part, values in trained.items():
            atol = 1e-4 if part == "predictions" else 1e-5
            np.testing.assert_allclose(
                values, one[name][part], rtol=1e-5, atol=atol, err_msg=f"{name} {part}"
            )


@pytest.mark.long
@pytest.mark.timeout(2 * LONGEST)
def test_replicas_and_workers_equal_one_device():
    printed = run_python(TESTS / "distributed_training.py", KERAS_BACKEND="tensorflow")
    found = json.loads(printed.splitlines()[-1])
    assert set(found["several"]) == {"plain", "neighborhoods", "maml"}
    assert_equal(found["one"], found["several"])
    # The mean of the replicas' means, as in Keras.
    np.testing.assert_allclose(*found["uneven"], rtol=1e-5, atol=1e-5)
    first, second = from_workers()
    for worker in (first, second):
        assert set(worker["several"]) == {"neighborhoods", "maml"}
        assert_equal(found["one"], worker["several"])
    assert first["drawn"] == second["drawn"]


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
