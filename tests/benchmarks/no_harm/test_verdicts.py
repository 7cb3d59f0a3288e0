"""Verdicts, from runs that are made up."""

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

from no_harm_runs import record, several

from benchmarks.no_harm import comparison, verdicts
from benchmarks.no_harm.methods import COMPARED


def lines_of(title, found):
    lines = verdicts.lines(comparison.compare(found))
    return [line for line in lines if line.split(" ", 1)[1].startswith(f"{title} (")]


def test_a_loss_fails_and_is_named():
    found = several("plain", [0.5, 0.6]) + several("static_dns", [0.48, 0.58])
    found += several("plain", [0.5, 0.6], network="small_resnet")
    found += several("static_dns", [0.53, 0.63], network="small_resnet")
    worst, mean, gap = lines_of("static DNS", found)
    assert worst == "FAIL static DNS (2 cells): no cell below -1.0 points: " + (
        "digits narrow CNN -2.00 ± 0.00 (last 3 epochs -1.00)"
    )
    assert mean.startswith("PASS") and mean.endswith("+0.50")
    assert gap.startswith("PASS")


def test_a_loss_of_one_seed_has_no_interval():
    found = several("plain", [0.5]) + several("static_dns", [0.48])
    worst, *_ = lines_of("static DNS", found)
    assert ": digits narrow CNN -2.00 of one seed (last 3 epochs -1.00); undecided" in worst


def test_a_low_mean_fails():
    found = several("plain", [0.5, 0.6]) + several("static_dns", [0.495, 0.595])
    worst, mean, _ = lines_of("static DNS", found)
    assert worst.startswith("PASS") and "half-width" not in worst
    assert mean.startswith("FAIL") and mean.endswith("-0.50")


def test_differences_beyond_chance():
    plain = [0.5, 0.6, 0.7]
    found = several("plain", plain) + several("static_dns", [0.49, 0.589, 0.691])
    found += several("dynamic_dns", [0.52, 0.621, 0.719])
    found += several("static_uns", [0.4, 0.7, 0.65])
    last, mean = verdicts.clear_differences(comparison.compare(found)).splitlines()
    assert last == (
        "* After the last epoch: 1 above, 1 below zero. "
        "Below: static DNS, digits narrow CNN -1.00 ± 0.25."
    )
    assert mean.startswith("* Mean of the last 3 epochs: ")
    (none, _) = verdicts.clear_differences([]).splitlines()
    assert none.endswith("0 above, 0 below zero. Below: none.")


def test_gaps_beyond_chance():
    found = several("plain", [0.5] * 3, gap=0.1) + several("static_dns", [0.5] * 3, gap=0.2)
    found += several("dynamic_dns", [0.5] * 3, gap=0.105)
    # Of these three on average 0.12 above plain's, one is below it.
    for seed, gap in enumerate((0.05, 0.3, 0.31)):
        found.append(record("static_uns", seed, 0.5, gap=gap))
    assert verdicts.clear_gaps(comparison.compare(found)) == (
        "* Too large in 2 of 3 cells; baselines beside themselves: in about 0.\n"
        "* Clearly more than 1 above the baseline's: "
        "static DNS, digits narrow CNN +10.0 ± 0.0."
    )
    assert verdicts.clear_gaps([]).endswith("above the baseline's: none.")


def test_scattered_seeds_need_more():
    found = several("plain", [0.5, 0.6]) + several("static_dns", [0.5, 0.7])
    worst, *_ = lines_of("static DNS", found)
    assert worst.startswith("PASS")
    assert worst.endswith("half-width above 2.0: digits narrow CNN (seeds: 2)")


@pytest.mark.parametrize(
    ("plain", "own", "verdict"),
    [
        (0.0, 0.029, "PASS"),
        (0.0, 0.031, "FAIL"),
        (0.2, 0.209, "PASS"),
        (0.2, 0.211, "FAIL"),
    ],
)
def test_gap_between_training_and_inference(plain, own, verdict):
    found = several("plain", [0.5], gap=plain) + several("static_dns", [0.5], gap=own)
    *_, gap = lines_of("static DNS", found)
    assert gap.startswith(verdict)


def test_a_gap_that_fails_is_named_with_both_modes():
    found = several("plain", [0.5], gap=0.01) + several("static_dns", [0.5], gap=0.2)
    *_, gap = lines_of("static DNS", found)
    assert gap.endswith(
        "digits narrow CNN 20.0 (90.0 to 70.0 %), baseline 1.0 (90.0 to 89.0 %), "
        "+19.0 of one seed"
    )
    found = [
        record(name, seed, 0.5, gap=gap)
        for name, gaps in (("plain", (0.0, 0.0)), ("static_dns", (0.1, 0.2)))
        for seed, gap in enumerate(gaps)
    ]
    *_, gap = lines_of("static DNS", found)
    assert gap.endswith("baseline 0.0 (90.0 to 90.0 %), +15.0 ± 63.5")


def test_what_was_not_run_is_said():
    found = several("plain", [0.5]) + several("static_dns", [0.5])
    lines = verdicts.lines(comparison.compare(found))
    assert sum(line.startswith("NOT RUN ") for line in lines) == len(COMPARED) - 1
