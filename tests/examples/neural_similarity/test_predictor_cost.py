"""The example of what predictors cost, on made-up images."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from examples.neural_similarity import predictor_cost

ROOT = pathlib.Path(__file__).parents[3]


OWN_KINDS = [
    name for name, each in predictor_cost.PREDICTORS.items() if "kind" in (each or {})
]


@pytest.mark.long
@pytest.mark.parametrize("name", OWN_KINDS)
def test_every_kind_starts_as_the_plain_network(name):
    model = predictor_cost.make_model("DNS", name, (16, 16, 3), 4)
    plain = predictor_cost.make_model("DNS", "plain", (16, 16, 3), 4)
    images = np.random.default_rng(0).random((2, 16, 16, 3)).astype("float32")
    for layer, other in zip(model.layers, plain.layers, strict=True):
        if hasattr(layer, "kernel"):
            layer.kernel.assign(other.kernel)
    np.testing.assert_allclose(model(images), plain(images), atol=1e-5)


@pytest.mark.long
def test_records_table_and_picture(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for number, part in enumerate(("train", "validation", "test")):
        arrays[f"{part}_images"] = rng.integers(0, 255, (20, 16, 16, 3), "uint8")
        arrays[f"{part}_labels"] = np.arange(20) % 2 + 2 * number
    np.savez(tmp_path / "images.npz", **arrays)
    command = [
        *(sys.executable, "-m", "examples.neural_similarity.predictor_cost"),
        *(f"--data_file={tmp_path / 'images.npz'}", f"--output_dir={tmp_path}"),
        f"--state_dir={tmp_path}/unfinished",
        *("--classes=2", "--epochs=1", "--seeds=0", "--predictors=plain,default"),
    ]
    for printed in ("DNS, default, seed 0\n", "DNS, default, seed 0: finished before"):
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert printed in done.stdout
    folder = tmp_path / "results" / predictor_cost.PLACE
    names = {"DNS_plain_0", "DNS_default_0", "UNS_default_0", "setting"}
    assert {path.stem for path in folder.glob("*.json")} == names
    record = json.loads((folder / "UNS_default_0.json").read_text())
    low, high = record["step_time_ratio"][1:]
    assert 1 < low <= record["step_time_ratio"][0] <= high
    assert record["multiply_adds"] > record["plain_multiply_adds"]
    section = predictor_cost.section(tmp_path / "results")
    (line,) = [
        line for line in section.splitlines() if line.startswith("| DNS | default |")
    ]
    assert line.endswith("| 0 |")
    assert "Not run: DNS width 4, " in section
    assert "DNS default," not in section
    assert (tmp_path / "results" / "figures" / "predictor_cost.png").stat().st_size > 5000
