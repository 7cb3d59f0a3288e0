"""Differences are paired, and intervals follow from them."""

import itertools
import math

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

from experiments.common import runs
from experiments.common.data import Split
from experiments.demo import table as demo_table
from experiments.few_shot import table as few_shot_table
from experiments.no_harm import comparison, training
from experiments.no_harm.data import Images
from experiments.no_harm.methods import COMPARED, METHODS
from experiments.no_harm.networks import NETWORKS
from experiments.regression import table as regression_table
from experiments.speed import timing

SETTING = training.Setting(epochs=2, batch_size=4, compared_images=6)


# Times, on a clock that only the timed functions advance.


@pytest.fixture
def step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def make(times):
        times = itertools.repeat(times) if isinstance(times, float) else iter(times)

        def run():
            now[0] += next(times)

        return run

    return make


def test_ratios_of_times(step):
    steps = {"plain": step(2.0), "slow": step([700.0] + [7.0] * 4)}
    found = timing.ratios_to_first(steps, rounds=4, warm_up=1)
    for name, ratio in (("plain", 1.0), ("slow", 3.5)):
        assert list(found[name].values()) == [ratio] * 3 + [4]


# Differences of accuracies, of made-up records.


def no_harm_run(method, seed, accuracy, gap=0.0, **changes):
    last = {"training": 0.9, "inference": 0.9}
    first = {"training": 0.9, "inference": 0.9 - gap}
    return {
        "dataset": "digits",
        "network": "narrow_cnn",
        "method": method,
        "seed": seed,
        "parameters": 1000,
        "test_accuracy": [0.1, accuracy],
        "by_mode": {"first_epoch": first, "last_epoch": last},
        "seconds_per_step": 1.0,
        "command": "python -m experiments.no_harm",
        **changes,
    }


def no_harm_runs(**accuracies):
    return [
        no_harm_run(method, seed, accuracy)
        for method, of_seeds in accuracies.items()
        for seed, accuracy in enumerate(of_seeds)
    ]


def test_differences_are_paired_by_seed():
    found = no_harm_runs(plain=[0.5, 0.7, 0.9])
    found += no_harm_runs(static_dns=[0.51, 0.72, 0.93])[::-1]
    found.append(no_harm_run("static_dns", 7, 0.1))  # A seed that `plain` lacks.
    (cell,) = comparison.compare(found)
    assert cell.differences() == pytest.approx([1.0, 2.0, 3.0])
    # Student's t for two degrees of freedom, 4.303, and a standard deviation of 1.
    assert cell.half_width() == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)


def test_runs_are_paired_with_the_baseline_of_their_commit():
    found = [
        no_harm_run("plain", 0, 0.5, commit="a"),
        no_harm_run("plain", 0, 0.6, commit="b"),
        no_harm_run("static_dns", 0, 0.7, commit="c"),
        no_harm_run("dynamic_dns", 0, 0.7, commit="a"),
    ]
    first, second = comparison.compare(found)
    assert (first.method, second.method) == ("static_dns", "dynamic_dns")
    assert first.differences() == pytest.approx([10.0])
    assert second.differences() == pytest.approx([20.0])


def test_demo_and_regression():
    found = [
        {"method": name, "seed": seed, "test_accuracy": accuracy, "parameters": 1234}
        for name, accuracies in {"plain": (0.8, 0.9), "static": (0.7, 0.6, 0.8)}.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    _, _, plain, static, _, note, *_ = demo_table.table(found).splitlines()
    assert plain == "| CNN | 80.00 and 90.00 |  |  | 1,234 |  |"
    assert "neural similarity | 70.00 ± 10.00 | -10.00 and -30.00 |" in static
    assert note == "± over 3 seeds."
    # Of the differences -0.25, -0.5 and 0: t = -sqrt(3).
    errors = {"vanilla": [0.5, 1.0, 0.75], "neighborhoods": [0.25, 0.5, 0.75]}
    folds = [
        {"key": ["fold", number], "fold": number, "knn": {"test_mse": 9.0}}
        | {"vanilla": {"test_mse": vanilla}}
        | {"neighborhoods": {"test_mse": ours, "test_mse_unadapted": 1.0}}
        for number, (vanilla, ours) in enumerate(zip(*errors.values(), strict=True))
    ]
    folds += [
        {"key": ["knn", number], "fold": number, "knn": {"test_mse": error}}
        for number, error in ((2, 0.75), (0, 0.5), (1, 1.0))
    ]
    found = regression_table.errors_of(folds)
    assert found["knn"] == errors["vanilla"]
    for other in ("vanilla", "knn"):
        assert regression_table.p_value(found, other) == pytest.approx(0.225, abs=1e-3)


def test_few_shot_differences_are_paired_by_seed():
    found = [
        {"method": method, "seed": seed, "accuracy": accuracy}
        for method, accuracies in {
            "finetuning": (0.5, 0.6, 0.7),
            "nearest_centroid": (0.6, 0.6, 0.8, 0.9),
        }.items()
        for seed, accuracy in enumerate(accuracies)
    ]
    pair = "nearest_centroid", "finetuning"
    cell = few_shot_table._difference(*pair, found, {"ways": 2}, trials=None)
    assert cell == "+6.67 ± 5.77"


@pytest.mark.parametrize(
    ("plain", "own", "large"),
    [(0.0, 0.029, 0), (0.0, 0.031, 1), (0.2, 0.209, 0), (0.2, 0.211, 1)],
)
def test_gap_between_training_and_inference(plain, own, large):
    found = [no_harm_run("plain", 0, 0.5, plain), no_harm_run("static_dns", 0, 0.5, own)]
    (cell,) = comparison.compare(found)
    assert cell.has_large_gap == large


# What the runs of the matrix are.


def tiny_cell(network="no_batch_norm"):
    images = np.random.default_rng(0).random((10, 8, 8, 1)).astype("float32")
    split = Split(images, np.arange(10) % 3)
    return training.Cell(SETTING, Images(split, split, 3), NETWORKS[network], seed=5)


@pytest.mark.parametrize("name", COMPARED)
def test_methods_start_as_the_plain_network(name):
    tried = tiny_cell("narrow_cnn" if name == "neighbors_film" else "no_batch_norm")
    plain, images = tried._initial(), tried.images.train.images
    model = METHODS[name].make(tried.make_network, plain)
    unadapted = {"adapt": False} if hasattr(model, "dictionary") else {}
    received = model(images, **unadapted)
    # `CosineDense` has no bias, and starts at weights of its own.
    if name not in ("plain_cosine", "neighbors_cosine", "neighbors_film"):
        np.testing.assert_allclose(received, plain(images), rtol=1e-4, atol=1e-5)


def test_runs_are_made_once_and_go_on_from_the_plain_one(tmp_path, eager):
    records = runs.RunRecords(tmp_path / "made.jsonl")
    key = (3, "digits", "no_batch_norm")
    names = ("plain", "plain_longer", "plain_rate")
    made = {name: tiny_cell().run(METHODS[name]) for name in names}
    assert len({run["training_loss"] for run in made.values()}) == 3
    whole = tiny_cell()
    whole.run(METHODS["plain"])
    after = whole.run(METHODS["plain_longer"])
    assert after["training_loss"] == made["plain_longer"]["training_loss"]
    for name, run in made.items():
        records.add((key[1], key[2], name, key[0]), run)
        assert math.isfinite(run["training_loss"])
        assert set(run["by_mode"]) == {"first_epoch", "last_epoch"}
    before = records.runs
    training.run_cell(records, SETTING, key, list(made))
    assert records.runs == before
