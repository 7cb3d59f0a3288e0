"""Figure 3 in small: the linear head alone fails, its neighbours make up for it."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np

from examples import spirals

ROOT = pathlib.Path(__file__).parents[2]


def test_neighbors_make_a_linear_head_follow_the_spirals(tmp_path):
    arguments = ("--epochs=25", "--frames=3", f"--output_dir={tmp_path}")
    result = subprocess.run(
        [sys.executable, "-m", "examples.spirals", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    content = json.loads((tmp_path / "results/spirals.json").read_text())
    assert content["linear_test_accuracy"] < 0.65
    assert content["test_accuracy"] > 0.95
    assert content["unadapted_test_accuracy"] < 0.7
    assert content["test_accuracies"]["0"] < 0.7
    assert content["test_accuracies"]["25"] == content["test_accuracy"]
    assert f"{100 * content['test_accuracy']:.1f} %" in result.stdout
    figures = tmp_path / "results/figures"
    assert (figures / "spirals.png").stat().st_size > 10_000
    assert (figures / "spirals.gif").read_bytes()[:6] == b"GIF89a"


def test_frames_without_pillow(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "PIL" else find(name, *rest),
    )
    rng = np.random.default_rng(0)
    points, _ = spirals.spirals(20, rng)
    regions = np.zeros(len(spirals.grid()), int)
    snapshots = [
        spirals.Snapshot(epoch, rng.normal(size=(4, 2)), 0.5, regions) for epoch in (0, 2)
    ]
    written = spirals.write_pictures(snapshots, [0, 1, 0, 1], points, tmp_path)
    names = ["spirals.png", "spirals_00.png", "spirals_01.png"]
    assert [path.name for path in written] == names
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_figures_in_results_are_those_of_the_paper():
    """What the repository says: near chance alone, at least 99 % with neighbours."""
    content = json.loads((ROOT / "results/spirals.json").read_text())
    assert content["linear_test_accuracy"] < 0.6
    assert content["test_accuracy"] >= 0.99
    assert content["num_neighbors"] == 100
