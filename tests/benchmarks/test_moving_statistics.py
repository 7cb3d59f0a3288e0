"""The comparison of averages of batches' statistics, on made-up images."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

from benchmarks import moving_statistics
from benchmarks.moving_statistics import ANEW, AVERAGES, OURS, Average, lag
from nsl_keras.layers import BatchNormalization

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("momentum", [0.9, 0.99])
@pytest.mark.parametrize("window", [None, OURS])
def test_averages_are_those_of_the_layers(momentum, window):
    make = BatchNormalization if window else keras.layers.BatchNormalization
    layer = make(momentum=momentum)
    layer.build((8, 3))
    average = Average(momentum, window, [np.zeros(3), np.ones(3)])
    rng = np.random.default_rng(0)
    for _ in range(8):
        batch = rng.normal(2, 3, size=(8, 3)).astype("float32")
        layer(batch, training=True)
        average.update([batch.mean(axis=0), batch.var(axis=0)], 8)
    stored = layer.moving_mean, layer.moving_variance
    for one, other in zip(average.values, stored, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_lag_is_the_mean_loss_of_accuracy():
    name = "0.9 512 32"
    run = {"accuracies": {"1": {ANEW: 0.5, name: 0.4}, "2": {ANEW: 0.5, name: 0.6}}}
    assert lag(run, 0.9, OURS) == pytest.approx(0)
    run["accuracies"]["2"][name] = 0.44
    assert lag(run, 0.9, OURS) == pytest.approx(8)


@pytest.mark.long
def test_records_and_table(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for number, part in enumerate(("train", "validation", "test")):
        arrays[f"{part}_images"] = rng.integers(0, 255, (100, 16, 16, 3), "uint8")
        arrays[f"{part}_labels"] = np.arange(100) % 20 + 20 * number
    np.savez(tmp_path / "images.npz", **arrays)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.moving_statistics", "--seeds=3"),
            *(f"--data_file={tmp_path / 'images.npz'}", f"--output_dir={tmp_path}"),
            "--steps=4,2",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    section = moving_statistics.section(tmp_path / "results")
    lines = [line for line in section.splitlines() if line.startswith("| 0.9")]
    assert len(lines) == len(AVERAGES)
    assert "steps 2, 4 of Adam" in section
    assert "seeds 3:" in section
    # After two steps the average over the whole of the examples is not yet Keras's.
    assert len(set(line.split("|", 3)[3] for line in lines)) > 2
