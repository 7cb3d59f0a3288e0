"""The demo in small: every step of it, on few images."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DATA = os.environ.get("NSL_KERAS_DATA_DIR")


def run(folder, *arguments):
    result = subprocess.run(
        [
            *(sys.executable, "-m", "examples.demo"),
            *(f"--output_dir={folder}", "--verbose=0", *arguments),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    return result


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


def test_digits_and_versions(tmp_path):
    arguments = ("--seeds=2", "--epochs=1", "--train_examples=200")
    models = ("--model=linear", "--model=linear_neighborhoods")
    content = check_run(
        tmp_path,
        run(tmp_path, *arguments, *models),
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
    # An existing version stops the run before it trains anything.
    refused = run(tmp_path, *arguments, *models, "--version=1")
    assert refused.returncode != 0
    assert "`version` must not exist yet, nothing is overwritten" in refused.stderr


def test_mirrored_strategy(tmp_path):
    result = run(
        tmp_path,
        *("--strategy=mirrored", "--logical_devices=2", "--seeds=1", "--epochs=1"),
        *("--train_examples=128", "--model=neighborhoods"),
    )
    check_run(tmp_path, result, "digits", ["neighborhoods"])


def test_missing_data_folder(tmp_path):
    result = run(tmp_path, "--dataset=cifar10", f"--data_dir={tmp_path}/none")
    assert result.returncode != 0
    assert "`data_dir` must hold a prepared copy of 'cifar10'" in result.stderr
    assert "tfds.load('cifar10'" in result.stderr


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
