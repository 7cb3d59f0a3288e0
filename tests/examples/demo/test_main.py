"""The demo in small: every step of it, on few images."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from examples.common import runs
from examples.demo import table

ROOT = pathlib.Path(__file__).parents[3]
DATA = os.environ.get("NSL_KERAS_DATA_DIR")


def run(folder, *arguments, script=None, several=()):
    """The example as a command, or a script that is told the flags of several runs."""
    common = (f"--output_dir={folder}", f"--state_dir={folder}/unfinished", "--verbose=0")
    if script is None:
        command = ("-m", "examples.demo", *common, *arguments)
    else:
        command = ("-c", script, json.dumps([[*common, *each] for each in several]))
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
    records = runs.RunRecords(folder / "results/demo" / dataset)
    assert {run["method"] for run in records.runs} == set(models)
    (served,) = (run["served"] for run in records.runs if "served" in run)
    assert served["agreeing_predictions"] == served["test_images"]
    path = folder / served["saved_model"]
    assert (path / "saved_model.pb").exists()
    assert "Test accuracy" in (path / "README.md").read_text()
    assert list((folder / "results/figures").glob(f"{dataset}_*.png"))
    assert "| model | test accuracy, %" in result.stdout
    return records, served


#: Interrupts the example after its first model, and goes on.
INTERRUPTED = """
import json, sys
from examples.demo import __main__ as demo

(arguments,) = json.loads(sys.argv[1])
demo.FLAGS(["demo", *arguments])
train, step_time_ratios = demo.train, demo.step_time_ratios

def first_alone(name, *others):
    if name == "linear_neighborhoods":
        raise KeyboardInterrupt
    return train(name, *others)

def told(models, batch):
    print("Timed:", *models)
    return step_time_ratios(models, batch)

demo.train = first_alone
try:
    demo.main(["demo"])
except KeyboardInterrupt:
    print("Interrupted")
demo.train, demo.step_time_ratios = train, told
demo.main(["demo"])
"""


@pytest.mark.long
def test_digits(tmp_path):
    flags = (
        *("--seeds=2", "--epochs=1", "--train_examples=200"),
        *("--model=linear", "--model=linear_neighborhoods"),
    )
    result = run(tmp_path, script=INTERRUPTED, several=[flags])
    records, served = check_run(
        tmp_path, result, "digits", ["linear", "linear_neighborhoods"]
    )
    assert "Interrupted" in result.stdout
    assert "seed 0: finished before" in result.stdout
    # Ratios are to the first.
    assert "Timed: linear linear_neighborhoods\n" in result.stdout
    assert os.listdir(tmp_path / "unfinished") == []
    assert served["saved_model"].endswith("digits_linear/1")
    assert records.setting["train_examples"] == 200
    assert len(records.runs) == 4
    assert [run["method"] for run in records.runs if "step_time_ratio" in run] == [
        *("linear", "linear_neighborhoods")
    ]


#: Runs the example's `main` with each of the lists of flags, and prints its errors.
SEVERAL_RUNS = """
import json, sys
from absl.testing import flagsaver
from examples.demo import __main__ as demo

for arguments in json.loads(sys.argv[1]):
    with flagsaver.flagsaver():
        demo.FLAGS.unparse_flags()
        demo.FLAGS(["demo", *arguments])
        try:
            demo.main(["demo"])
        except ValueError as error:
            print(error)
"""


@pytest.mark.long
def test_mirrored_strategy_and_errors(tmp_path):
    small = ("--seeds=1", "--epochs=1", "--train_examples=128", "--model=neighborhoods")
    result = run(
        tmp_path,
        script=SEVERAL_RUNS,
        several=[
            (*small, "--strategy=mirrored", "--logical_devices=2"),
            # An existing version stops the run before it trains anything.
            (*small, "--version=1"),
            ("--dataset=cifar10", f"--data_dir={tmp_path}/none"),
            (*small, "--tune", "--model=static"),
        ],
    )
    check_run(tmp_path, result, "digits", ["neighborhoods"])
    assert "`version` must not exist yet, nothing is overwritten" in result.stdout
    assert result.stdout.count("seed 0\n") == 1
    assert "`data_dir` must hold a prepared copy of 'cifar10'" in result.stdout
    assert "tfds.load('cifar10'" in result.stdout
    assert "with `tune`. Received: model='static'" in result.stdout


@pytest.mark.data
@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_prepared_data_sets(tmp_path, dataset):
    result = run(
        tmp_path,
        *(f"--dataset={dataset}", f"--data_dir={DATA}", "--seeds=1", "--epochs=4"),
        *("--train_examples=2048", "--model=linear", "--model=linear_neighborhoods"),
    )
    records, _ = check_run(tmp_path, result, dataset, ["linear", "linear_neighborhoods"])
    assert records.setting["test_examples"] == 10000
    assert records.runs[0]["test_accuracy"] > 0.15


def test_differences_are_paired_by_seed():
    found = [
        {"method": name, "seed": seed, "test_accuracy": accuracy, "parameters": 1234}
        for name, accuracies in {"plain": (0.8, 0.9), "static": (0.7, 0.6)}.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    found[2]["step_time_ratio"] = {"median": 1.25}
    _, _, plain, static = table.table(found).splitlines()
    assert plain == "| CNN | 85.00 ± 7.07 |  |  | 1,234 |  |"
    assert "neural similarity | 65.00 ± 7.07 | -20.00 ± 14.14 |" in static
    assert static.endswith("|  | 1,234 | 1.25x |")
