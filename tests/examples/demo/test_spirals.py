"""Figure 3 in small: the linear head alone fails, its neighbours make up for it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.long
def test_neighbors_make_a_linear_head_follow_the_spirals(tmp_path):
    arguments = ("--epochs=25", "--frames=3", f"--output_dir={tmp_path}")
    result = subprocess.run(
        [sys.executable, "-m", "examples.demo.spirals", *arguments],
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


def test_figures_in_results_are_those_of_the_paper():
    """What the repository says: near chance alone, at least 99 % with neighbours."""
    content = json.loads((ROOT / "results/spirals.json").read_text())
    assert content["linear_test_accuracy"] < 0.6
    assert content["test_accuracy"] >= 0.99
    assert content["num_neighbors"] == 100
