"""Table 2 in small: data, folds without leaks, and one run from end to end."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from examples.common import runs, stopping
from examples.regression import data as regression_data
from examples.regression import table

ROOT = pathlib.Path(__file__).parents[3]
rng = np.random.default_rng(0)


def test_diabetes_is_the_default():
    data = regression_data.load("diabetes")
    assert data.x.shape == (442, 10)
    assert data.y.shape == (442, 1)


def test_folds():
    data = regression_data.RegressionData(
        "mine", rng.normal(3, 5, size=(101, 4)), rng.normal(size=(101, 2))
    )
    data.x[:, 1] = 7.0  # A constant column.
    data.y[:, 0] = np.arange(101)
    found = regression_data.folds(data, 5, 0.25, seed=3)
    tested = []
    for fold in found:
        parts = (fold.train, fold.validation, fold.test)
        assert [len(part.x) for part in parts] in ([60, 20, 21], [61, 20, 20])
        np.testing.assert_allclose(fold.train.x.mean(axis=0), 0, atol=1e-5)
        deviations = fold.train.x.std(axis=0)
        np.testing.assert_allclose(deviations, [1, 0, 1, 1], atol=1e-5)
        np.testing.assert_allclose(fold.train.y.std(axis=0), 1, rtol=1e-5)
        # Every part on the scale of the training part: all rows are there, once.
        rows = np.concatenate([part.y[:, 0] for part in parts])
        steps = np.diff(np.sort(rows))
        np.testing.assert_allclose(steps, steps[0], rtol=1e-3)
        first = np.sort(rows)[0]
        tested += np.round((fold.test.y[:, 0] - first) / steps[0]).astype(int).tolist()
    assert sorted(tested) == list(range(101))


def write_table(path, header=""):
    table = rng.normal(size=(12, 5)).round(3)
    lines = [",".join(map(str, row)) for row in table]
    path.write_text("\n".join([*([header] if header else []), *lines]) + "\n")
    return table


@pytest.mark.parametrize("header", ["", "a,b,c,d,e"])
def test_own_files(tmp_path, header):
    table = write_table(tmp_path / "mine.csv", header)
    data = regression_data.load("diabetes", data_file=str(tmp_path / "mine.csv"), targets=2)
    assert data.name == "mine"
    np.testing.assert_array_equal(data.x, table[:, :3])
    np.testing.assert_array_equal(data.y, table[:, 3:])
    np.savez(tmp_path / "other.npz", x=table[:, :3], y=table[:, 3])
    data = regression_data.load("diabetes", data_file=str(tmp_path / "other.npz"))
    np.testing.assert_array_equal(data.y, table[:, 3:4])


@pytest.mark.parametrize(
    ("name", "header", "inputs", "targets"),
    [
        ("music", "", [1, 2, 3, 4], [0]),
        ("toms", "", [0, 1, 2, 3], [4]),
        ("cte", "patient,a,b,c,reference", [1, 2, 3], [4]),
        ("super", "a,b,c,d,critical_temp", [0, 1, 2, 3], [4]),
        ("gom", "", [0, 1, 2], [3, 4]),
    ],
)
def test_uci_files(tmp_path, name, header, inputs, targets):
    table = write_table(tmp_path / regression_data.UCI_FILES[name].name, header)
    data = regression_data.load(name, str(tmp_path))
    np.testing.assert_array_equal(data.x, table[:, inputs])
    np.testing.assert_array_equal(data.y, table[:, targets])


def test_bad_files(tmp_path):
    with pytest.raises(ValueError, match="`data_dir` must lead to a file"):
        regression_data.load("gom", str(tmp_path))
    with pytest.raises(ValueError, match="`data_file` must lead to a file"):
        regression_data.load("diabetes", data_file=str(tmp_path / "none.csv"))
    np.savez(tmp_path / "other.npz", x=np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"must hold arrays x and y.*without y"):
        regression_data.load("diabetes", data_file=str(tmp_path / "other.npz"))
    (tmp_path / "words.csv").write_text("1,2\n3,four\n")
    with pytest.raises(ValueError, match=r"`data_file` must hold finite.*y of words"):
        regression_data.load("diabetes", data_file=str(tmp_path / "words.csv"))


@pytest.mark.long
def test_a_short_run(tmp_path):
    arguments = (
        *("--folds=2", "--layers=2", "--units=8", "--decays=0,0.1", "--epochs=3"),
        *("--temperatures=0.1", "--num_neighbors=20", f"--output_dir={tmp_path}"),
        f"--state_dir={tmp_path}/unfinished",
    )
    # As a run leaves it that is interrupted in its second fold.
    figures = {"test_mse": 0.5, "validation_mse": 0.5, "trials": [{"validation_mse": 0.5}]}
    ours = {**figures, "test_mse_unadapted": 0.6, "parameters": 222}
    sizes = {"layers": 2, "units": 8}
    left = {
        "knn": {"test_mse": 0.625},
        "vanilla": {**figures, **sizes, "parameters": 1},
        "neighborhoods": {**ours, **sizes},
    }
    setting = {
        **{"folds": 2, "validation_share": 0.2, "layers": ["2"], "units": ["8"]},
        **{"decays": ["0", "0.1"], "temperatures": ["0.1"], "num_neighbors": 20},
        **{"epochs": 3, "patience": 10, "seed": 0},
    }
    records = runs.RunRecords(
        tmp_path / "results/regression/diabetes",
        {
            **{"data": "diabetes", "examples": 442, "features": 10, "outputs": 1},
            "protocol": setting,
        },
    )
    records.add(("fold", 0), {**left, "command": "before"})

    def call(*more):
        return subprocess.run(
            [sys.executable, "-m", "examples.regression", *arguments, *more],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=280,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )

    stopped = call("--stop_after_minutes=0")
    assert stopped.returncode == stopping.OutOfTime.CODE, stopped.stderr[-3000:]
    assert len(records.runs) == 1
    result = call()
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Fold 1: finished before" in result.stdout
    first, second = records.runs
    assert first == {**left, "command": "before"}
    assert len(second["vanilla"]["trials"]) == len(second["neighborhoods"]["trials"]) == 2
    for fold in (first, second):
        vanilla, ours = fold["vanilla"], fold["neighborhoods"]
        for chosen in (vanilla, ours):
            errors = [trial["validation_mse"] for trial in chosen["trials"]]
            assert chosen["validation_mse"] == min(errors)
        assert (ours["layers"], ours["units"]) == (vanilla["layers"], vanilla["units"])
        # The dictionary's 20 entries of 10 + 1 numbers, and one rate.
        assert ours["parameters"] == vanilla["parameters"] + 221
        assert ours["test_mse"] != ours["test_mse_unadapted"]
    assert 0.3 < second["knn"]["test_mse"] < 0.9
    assert table.table([records]) in result.stdout


#: Trains two epochs of 150 steps, and prints the states that are left.
LONG_EPOCHS = """
import pathlib, sys
import numpy as np
from examples.regression import __main__ as command, data

command.FLAGS(["regression", "--epochs=2"])
part = data.Part(np.ones((19_200, 2), "float32"), np.ones((19_200, 1), "float32"))
state = pathlib.Path(sys.argv[1])
choice = {"layers": 2, "units": 2, "decay": 0.0}
command.train(command.make_vanilla, data.Fold(part, part, part), choice, state)
print(*sorted(path.name for path in state.iterdir()))
"""


@pytest.mark.long
def test_long_epochs_are_kept_each(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", LONG_EPOCHS, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split() == ["epoch_1.state", "epoch_2.state"]


def test_section_of_the_results(tmp_path):
    assert "Not run" in table.section(tmp_path)
    setting = {"data": "gom", "examples": 1059, "features": 116, "protocol": {"folds": 3}}
    records = runs.RunRecords(tmp_path / "regression" / "gom", setting)
    for fold, (vanilla, ours) in enumerate([(0.5, 0.25), (1.0, 0.5), (0.75, 0.75)]):
        record = {
            "command": "python -m examples.regression",
            "knn": {"test_mse": 0.5},
            "vanilla": {"test_mse": vanilla},
            "neighborhoods": {"test_mse": ours, "test_mse_unadapted": 1.0},
        }
        records.add(("fold", fold), record)
    section = table.section(tmp_path)
    figures = ("0.5000 ± 0.0000", "0.7500 ± 0.2500", "0.5000 ± 0.2500", "1.0000 ± 0.0000")
    # Of the differences -0.25, -0.5 and 0: t = -sqrt(3).
    assert f"| gom | 1059 | 116 | {' | '.join(figures)} | 0.225 |" in section
    assert "| gom, published |  |  | 0.5982 ± 0.0521 |" in section
    assert "Not run: music, toms, cte, super" in section
