"""The demo in small: every step of it, on few images."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DATA = os.environ.get("NSL_KERAS_DATA_DIR")


def run(folder, *arguments, script=None, runs=()):
    """The example as a command, or a script that is told the flags of several runs."""
    common = (f"--output_dir={folder}", "--verbose=0")
    if script is None:
        command = ("-m", "examples.demo", *common, *arguments)
    else:
        command = ("-c", script, json.dumps([[*common, *each] for each in runs]))
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


def check_run(folder, result, dataset, models):
    assert result.returncode == 0, result.stderr[-3000:]
    content = json.loads((folder / f"results/demo_{dataset}.json").read_text())
    assert [row["model"] for row in content["table"]] == models
    served = content["served"]
    assert served["agreeing_predictions"] == served["test_images"]
    path = folder / served["saved_model"]
    assert (path / "saved_model.pb").exists()
    assert "Test accuracy" in (path / "README.md").read_text()
    assert list((folder / "results/figures").glob(f"{dataset}_*.png"))
    assert "| model | test accuracy, %" in result.stdout
    return content


def test_digits(tmp_path):
    content = check_run(
        tmp_path,
        run(
            tmp_path,
            *("--seeds=2", "--epochs=1", "--train_examples=200"),
            *("--model=linear", "--model=linear_neighborhoods"),
        ),
        "digits",
        ["linear", "linear_neighborhoods"],
    )
    assert content["served"]["saved_model"].endswith("digits_linear/1")
    assert content["train_examples"] == 200
    row = content["table"][1]
    assert row["compared_to"] == "linear"
    by_seed = [
        {r["seed"]: r["test_accuracy"] for r in content["runs"] if r["model"] == name}
        for name in ("linear_neighborhoods", "linear")
    ]
    differences = [by_seed[0][seed] - by_seed[1][seed] for seed in (0, 1)]
    assert abs(row["difference_mean"] - sum(differences) / 2) < 1e-9


#: Runs the example's `main` with each of the lists of flags, and prints its errors.
SEVERAL_RUNS = """
import json, sys
from absl.testing import flagsaver
from examples import demo

for arguments in json.loads(sys.argv[1]):
    with flagsaver.flagsaver():
        demo.FLAGS.unparse_flags()
        demo.FLAGS(["demo", *arguments])
        try:
            demo.main(["demo"])
        except ValueError as error:
            print(error)
"""


def test_mirrored_strategy_and_errors(tmp_path):
    small = ("--seeds=1", "--epochs=1", "--train_examples=128", "--model=neighborhoods")
    result = run(
        tmp_path,
        script=SEVERAL_RUNS,
        runs=[
            (*small, "--strategy=mirrored", "--logical_devices=2"),
            # An existing version stops the run before it trains anything.
            (*small, "--version=1"),
            ("--dataset=cifar10", f"--data_dir={tmp_path}/none"),
        ],
    )
    check_run(tmp_path, result, "digits", ["neighborhoods"])
    assert "`version` must not exist yet, nothing is overwritten" in result.stdout
    assert result.stdout.count("seed 0\n") == 1
    assert "`data_dir` must hold a prepared copy of 'cifar10'" in result.stdout
    assert "tfds.load('cifar10'" in result.stdout


@pytest.mark.data
@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_prepared_data_sets(tmp_path, dataset):
    result = run(
        tmp_path,
        *(f"--dataset={dataset}", f"--data_dir={DATA}", "--seeds=1", "--epochs=4"),
        *("--train_examples=2048", "--model=linear", "--model=linear_neighborhoods"),
    )
    content = check_run(tmp_path, result, dataset, ["linear", "linear_neighborhoods"])
    assert content["test_examples"] == 10000
    assert content["table"][0]["test_accuracy_mean"] > 0.15
