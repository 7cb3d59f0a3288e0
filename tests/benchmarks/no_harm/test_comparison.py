"""Differences that are paired by seed, and their intervals."""

import math

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

from no_harm_runs import record, several

from benchmarks.no_harm import comparison


def test_differences_are_paired_by_seed():
    found = several("plain", [0.5, 0.7, 0.9])
    found += several("static_dns", [0.51, 0.72, 0.93])[::-1]
    found.append(record("static_dns", 7, 0.1))  # A seed that plain lacks.
    (cell,) = comparison.compare(found)
    assert cell.differences == pytest.approx([1.0, 2.0, 3.0])
    assert cell.difference == pytest.approx(2.0)
    # Student's t for two degrees of freedom, 4.303, and a standard deviation of 1.
    assert cell.half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert cell.is_wide


def test_difference_of_the_last_epochs():
    accuracies = {"plain": [0.9, 0.5, 0.6, 0.7], "static_dns": [0.0, 0.53, 0.66, 0.67]}
    found = [
        {**record(method, 0, 0.0), "test_accuracy": each}
        for method, each in accuracies.items()
    ]
    (cell,) = comparison.compare(found)
    assert cell.difference == pytest.approx(-3.0)
    assert cell.difference_of_last_epochs == pytest.approx(2.0)


def test_one_seed_has_no_interval():
    (cell,) = comparison.compare(several("plain", [0.5]) + several("static_dns", [0.5]))
    assert cell.half_width == math.inf
    assert cell.is_wide


def test_conversions_are_compared_with_the_longer_training():
    found = several("plain", [0.5]) + several("plain_longer", [0.8])
    found += several("converted_static_dns", [0.7])
    (cell,) = comparison.compare(found)
    assert cell.difference == pytest.approx(-10.0)


def test_step_time_of_runs_made_side_by_side():
    found = several("plain", [0.5, 0.5, 0.5])
    found.append(record("static_dns", 0, 0.5, seconds=1.5))
    found += [
        record("static_dns", seed, 0.5, seconds=9.0, command="another") for seed in (1, 2)
    ]
    found.append(record("static_uns", 0, 0.5, command="another"))
    static_dns, static_uns = comparison.compare(found)
    assert static_dns.step_time == pytest.approx(1.5)
    assert static_uns.step_time is None


def test_chance_of_a_large_gap():
    gaps = (0.0, 0.1)
    found = several("static_dns", [0.5, 0.5])
    found += [record("plain", seed, 0.5, gap=gap) for seed, gap in enumerate(gaps)]
    (cell,) = comparison.compare(found)
    # Means of two draws are 0, 5 and 10 points, one in four, two and four: the first is
    # larger by more than a point in 5 of 16 pairs.
    assert cell.chance_of_a_large_gap == pytest.approx(5 / 16, abs=0.02)
    (cell,) = comparison.compare(several("plain", [0.5]) + several("static_dns", [0.5]))
    assert cell.chance_of_a_large_gap == 0
