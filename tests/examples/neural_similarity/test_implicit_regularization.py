"""Section 5.1: steps follow Eq. (6), and the two descents end where the README says."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
from golden_files import DTYPES

from examples.common import runs
from examples.neural_similarity import implicit_regularization as example

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.skipif("float64" not in DTYPES, reason="needs float64")
@pytest.mark.parametrize(
    ("scale", "data"),
    [
        (None, "half of each target"),
        (1.0, "whole targets"),
        (0.3, "half of each target"),
    ],
)
def test_a_tiny_step_is_equation_6(scale, data):
    keras.config.set_floatx("float64")
    inputs, targets, target, start = example.problem(*example.DATA[data], seed=3)
    # Far from the start, where the two terms of the factorized flow are alike in size.
    layer = example.make_layer(target + 300 * start, scale, dtype="float64")
    if scale is not None:
        matrix = np.random.default_rng(1).normal(size=(example.FEATURES,) * 2)
        layer.comparison.similarity_parameters.assign(scale * matrix)
    kernel = np.array(layer.kernel)
    before = example.matrix_of(layer)
    rate = 1e-7
    after = example.descend(layer, inputs, targets, rate, steps=1, points=1)[-1]
    # sum_i X_i r_i^T, over the entries that are seen.
    standard = inputs.T @ np.nan_to_num(targets - inputs @ before)
    expected = standard
    if scale is not None:
        matrix = scale * matrix
        np.testing.assert_allclose(before, matrix.T @ kernel, rtol=1e-10)
        expected = matrix.T @ matrix @ standard + standard @ kernel.T @ kernel
        assert np.linalg.norm(expected - standard) > 0.1 * np.linalg.norm(standard)
    derivative = (after - before) / rate
    error = np.max(np.abs(derivative - expected)) / np.max(np.abs(expected))
    assert error < 1e-5


def test_all_flows_start_at_the_same_matrix():
    _, _, _, start = example.problem(10, 1.0, seed=0)
    for scale in example.FLOWS.values():
        found = example.matrix_of(example.make_layer(start, scale))
        np.testing.assert_allclose(found, start, rtol=1e-5)


@pytest.mark.long
def test_both_descents_fit_and_differ():
    """At zero loss: the same where targets are whole, a lower rank where half is hidden."""
    found = {}
    for data in example.DATA:
        inputs, targets, target, start = example.problem(*example.DATA[data], seed=0)
        for flow in ("W", "M from I", "M from I / 10"):
            layer = example.make_layer(start, example.FLOWS[flow])
            matrices = example.descend(layer, inputs, targets, 0.2, 2000, points=2)
            assert len(matrices) == 3
            found[data, flow] = example.measures(matrices[-1], inputs, targets, target)
            begin = example.measures(matrices[0], inputs, targets, target)
            assert found[data, flow]["loss"] < 1e-3 * begin["loss"]
    whole, half = example.DATA
    for flow in ("M from I", "M from I / 10"):
        ratio = found[whole, flow]["nuclear_norm"] / found[whole, "W"]["nuclear_norm"]
        assert abs(ratio - 1) < 0.02
    norms = [
        found[half, flow]["nuclear_norm"] for flow in ("W", "M from I", "M from I / 10")
    ]
    assert norms[1] < norms[0]
    assert norms[2] < 0.85 * norms[0]
    assert (
        found[half, "M from I / 10"]["effective_rank"]
        < 0.6 * found[half, "W"]["effective_rank"]
    )


def test_effective_rank():
    inputs, targets, target, _ = example.problem(10, 1.0, seed=0)
    found = example.measures(np.diag([2.0, 2.0, 2.0, 0.0]), np.eye(4), np.eye(4), np.eye(4))
    assert found["nuclear_norm"] == pytest.approx(6)
    assert found["effective_rank"] == pytest.approx(3)
    assert found["loss"] == pytest.approx(0.5 * (3 + 1))
    assert found["distance"] == pytest.approx(1)
    assert example.measures(target, inputs, targets, target)["loss"] == pytest.approx(0)


@pytest.mark.long
def test_the_script(tmp_path):
    result = subprocess.run(
        [
            *(sys.executable, "-m", "examples.neural_similarity.implicit_regularization"),
            *(f"--output_dir={tmp_path}", "--steps=100", "--points=5", "--seeds=1"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = runs.RunRecords(tmp_path / "results" / example.PLACE).runs
    assert len(found) == len(example.DATA) * len(example.FLOWS)
    assert found[0]["steps"] == [0, 20, 40, 60, 80, 100]
    assert "| half of each target | M from I / 30 |" in result.stdout
    picture = tmp_path / "results/figures/implicit_regularization.png"
    assert picture.stat().st_size > 10_000
