"""Figure 3 in small: the linear head alone fails, its neighbours make up for it."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
#: As if Pillow were not installed.
WITHOUT_PILLOW = (
    "import importlib.util as u, runpy, sys; find = u.find_spec; "
    "u.find_spec = lambda name, *rest: None if name == 'PIL' else find(name, *rest); "
    "runpy.run_module('examples.spirals', run_name='__main__')"
)


def run(folder, *arguments, script=("-m", "examples.spirals")):
    result = subprocess.run(
        [sys.executable, *script, f"--output_dir={folder}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_neighbors_make_a_linear_head_follow_the_spirals(tmp_path):
    output = run(tmp_path, "--epochs=25", "--frames=3")
    content = json.loads((tmp_path / "results/spirals.json").read_text())
    assert content["linear_test_accuracy"] < 0.65
    assert content["test_accuracy"] > 0.95
    assert content["unadapted_test_accuracy"] < 0.7
    assert content["test_accuracies"]["0"] < 0.7
    assert content["test_accuracies"]["25"] == content["test_accuracy"]
    assert f"{100 * content['test_accuracy']:.1f} %" in output
    figures = tmp_path / "results/figures"
    assert (figures / "spirals.png").stat().st_size > 10_000
    assert (figures / "spirals.gif").read_bytes()[:6] == b"GIF89a"


def test_frames_without_pillow(tmp_path):
    arguments = ("--epochs=2", "--frames=2", "--examples=100")
    run(tmp_path, *arguments, script=("-c", WITHOUT_PILLOW))
    names = sorted(path.name for path in (tmp_path / "results/figures").iterdir())
    assert names == ["spirals.png", "spirals_00.png", "spirals_01.png"]


def test_figures_in_results_are_those_of_the_paper():
    """What the repository says: near chance alone, at least 99 % with neighbours."""
    content = json.loads((ROOT / "results/spirals.json").read_text())
    assert content["linear_test_accuracy"] < 0.6
    assert content["test_accuracy"] >= 0.99
    assert content["num_neighbors"] == 100
