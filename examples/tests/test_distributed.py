"""Training with Ray, and the manifest of a Kubernetes job."""

import json
import os
import subprocess

import numpy as np
import pytest
from helpers import ROOT, run_python


def test_manifest_of_kubernetes():
    yaml = pytest.importorskip("yaml")
    manifest = ROOT / "examples" / "distributed" / "kubernetes.yaml"
    service, job = yaml.safe_load_all(manifest.read_text())
    spec = job["spec"]["template"]["spec"]
    assert spec["subdomain"] == service["metadata"]["name"]
    (command,) = spec["containers"][0]["args"]
    export, _ = command.split("exec ")
    shown = subprocess.check_output(
        ["/bin/sh", "-c", export + 'echo "$TF_CONFIG"'],
        env={**os.environ, "JOB_COMPLETION_INDEX": "2"},
    )
    config = json.loads(shown)
    workers = config["cluster"]["worker"]
    assert len(workers) == job["spec"]["completions"]
    name = f"{job['metadata']['name']}-2.{service['metadata']['name']}"
    assert workers[config["task"]["index"]] == f"{name}:12345"


#: Equal to `train` on one device: in a process of its own, for its random numbers.
ONE_DEVICE = """
import sys
from examples.distributed import ray_train
ray_train.train({"epochs": 1, "batch_size": 64, "weights": sys.argv[1]})
"""


def test_ray_workers_equal_one_device(tmp_path):
    pytest.importorskip("ray.train")
    h5py = pytest.importorskip("h5py")
    one_device = tmp_path / "one.weights.h5"
    run_python("-c", ONE_DEVICE, one_device)
    command = ("-m", "examples.distributed.ray_train", "--epochs=1")
    printed = run_python(*command, f"--storage={tmp_path}").splitlines()
    (written,) = [line[6:] for line in printed if line.startswith("Wrote ")]
    compared = []

    def compare(name, one):
        if isinstance(one, h5py.Dataset) and one.dtype.kind == "f":
            compared.append(name)
            np.testing.assert_allclose(two[name], one, atol=1e-5)

    with h5py.File(one_device) as first, h5py.File(written) as two:
        first.visititems(compare)
    assert len(compared) > 5
