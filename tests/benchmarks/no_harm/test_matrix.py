"""Shares of the matrix, runs that are made once, and a training in small."""

import json
import math

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

from no_harm_runs import several

from benchmarks.no_harm import data, matrix, training
from benchmarks.no_harm.methods import METHODS
from examples.common import runs
from examples.common.data import Split

SETTING = training.Setting(epochs=1, batch_size=4, compared_images=6)


def tiny_images(*_, **__):
    generator = np.random.default_rng(0)
    images = generator.random((13, 8, 8, 1)).astype("float32")
    split = Split(images, np.arange(13) % 3)
    return data.Images(split.take(10), split, 3)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(data.Dataset, "load", tiny_images)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_shares_are_all_cells_once(count):
    everything = matrix.cells([0, 1, 2])
    shares = [matrix.cells([0, 1, 2], shard=(index, count)) for index in range(count)]
    assert sorted(cell for share in shares for cell in share) == sorted(everything)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_order_of_cells():
    found = matrix.cells([1, 0], ["mnist_6000", "digits"], ["no_batch_norm"])
    assert found == [
        (1, "digits", "no_batch_norm"),
        (1, "mnist_6000", "no_batch_norm"),
        (0, "digits", "no_batch_norm"),
        (0, "mnist_6000", "no_batch_norm"),
    ]


@pytest.mark.parametrize("text", ["2/2", "1", "-1/2", "a/b", "0/0"])
def test_bad_shards(text):
    with pytest.raises(ValueError, match="`shard` must be i/n with i < n"):
        matrix.parse_shard(text)


def test_shard():
    assert matrix.parse_shard("1/2") == (1, 2)


@pytest.mark.parametrize(
    ("network", "methods"),
    [
        ("no_batch_norm", ["plain", "static_dns", "neighbors_dense"]),
        pytest.param(
            "narrow_cnn",
            ["plain_longer", "dynamic_uns", "neighbors_film", "converted_dynamic_dns"],
            marks=pytest.mark.long,
        ),
    ],
)
def test_runs(network, methods, tiny, tmp_path):
    records = runs.RunRecords(tmp_path, {})
    matrix.run_cell(records, SETTING, (3, "digits", network), methods)
    found = {run["method"]: run for run in records.runs}
    assert set(found) == set(methods)
    for run in found.values():
        assert (run["dataset"], run["network"], run["seed"]) == ("digits", network, 3)
        assert run["command"].startswith("python -m benchmarks.no_harm")
        assert len(run["test_accuracy"]) == len(run["history"]) == 1
        assert math.isfinite(run["history"][0]["loss"])
        assert set(run["by_mode"]) == {"first_epoch", "last_epoch"}
        assert run["seconds_per_step"] > 0


def test_runs_are_made_once(tiny, tmp_path, monkeypatch):
    records = runs.RunRecords(tmp_path, {})
    cell = (0, "digits", "no_batch_norm")
    made = []

    def run(self, name):
        made.append(name)
        return {"test_accuracy": [0.5]}

    monkeypatch.setattr(training.Cell, "run", run)
    matrix.run_cell(records, SETTING, cell, ["plain", "static_dns"])
    matrix.run_cell(records, SETTING, cell)
    # Where there are no batch norms there is no iFiLM.
    first = ["plain", "static_dns"]
    others = [name for name in METHODS if name not in (*first, "neighbors_film")]
    assert made == [*first, *others]
    matrix.run_cell(records, SETTING, cell)
    assert len(made) == len(METHODS) - 1
    paths = [path for path in tmp_path.iterdir() if path.name != "setting.json"]
    assert all(json.loads(path.read_text())["method"] in made for path in paths)
    assert len(paths) == len(made)


@pytest.fixture
def scattered(tmp_path):
    """Three seeds of four methods: two of them scatter, as does plain trained longer."""
    records = runs.RunRecords(tmp_path, {})
    found = several("plain", [0.5, 0.6, 0.7]) + several("static_dns", [0.51, 0.61, 0.71])
    found += several("dynamic_dns", [0.5, 0.5, 0.9]) + several("plain_longer", [0.6] * 3)
    found += several("converted_neighbors", [0.1, 0.5, 0.9])
    found += several("static_uns", [0.1, 0.9])  # The third seed is still to come.
    for run in found:
        key = run["dataset"], run["network"], run["method"], run["seed"]
        records.add(key, run)
    return records


@pytest.mark.parametrize(
    ("cell", "methods", "most", "needed"),
    [
        (
            (3, "digits", "narrow_cnn"),
            METHODS,
            10,
            ["plain", "plain_longer", "dynamic_dns", "converted_neighbors"],
        ),
        ((3, "digits", "narrow_cnn"), ["dynamic_dns"], 10, ["plain", "dynamic_dns"]),
        ((3, "digits", "narrow_cnn"), METHODS, 3, []),
        ((3, "digits", "small_resnet"), METHODS, 10, []),
    ],
)
def test_only_methods_that_scatter_get_another_seed(cell, methods, most, needed, scattered):
    assert matrix.undecided(scattered, cell, methods, [0, 1, 2], most) == needed
