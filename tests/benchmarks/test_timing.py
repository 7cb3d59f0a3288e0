"""Ratios of times, on a clock of our own: real ones would make the tests chancy."""

import numpy as np
import pytest

from benchmarks import timing


class Clock:
    """A clock that only the timed callables advance, and which logs who did."""

    def __init__(self):
        self.now = 0.0
        self.speed = 1.0
        self.calls = []

    def __call__(self):
        return self.now

    def step(self, name, seconds):
        def run():
            self.calls.append(name)
            self.now += self.speed * (seconds() if callable(seconds) else seconds)

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    return clock


def test_ratios_of_constant_times(clock):
    steps = {"plain": clock.step("plain", 2.0), "slow": clock.step("slow", 7.0)}
    ratios = timing.ratios_to_first(steps, rounds=4)
    assert list(ratios) == ["plain", "slow"]
    assert ratios["plain"] == timing.Ratio(1.0, 1.0, 1.0, 4)
    assert ratios["slow"] == timing.Ratio(3.5, 3.5, 3.5, 4)


def test_rounds_run_every_candidate_in_turn(clock):
    steps = {name: clock.step(name, 1.0) for name in "abc"}
    timing.ratios_to_first(steps, rounds=2, warm_up=1, calls_per_round=2)
    assert clock.calls == [*"abc", *"aabbcc", *"aabbcc"]


def test_warm_up_is_not_measured(clock):
    tracing = iter([100.0, 50.0])
    steps = {
        "plain": clock.step("plain", 1.0),
        "traced": clock.step("traced", lambda: next(tracing, 3.0)),
    }
    assert timing.ratios_to_first(steps, rounds=3, warm_up=2)["traced"].high == 3.0
    with_tracing = iter([100.0])
    steps["traced"] = clock.step("traced", lambda: next(with_tracing, 3.0))
    assert timing.ratios_to_first(steps, rounds=1, warm_up=0)["traced"].median == 100.0


def test_slower_machine_leaves_the_ratios(clock):
    def slowing_down():
        clock.speed *= 1.5
        return 1.0

    steps = {"plain": clock.step("plain", slowing_down), "slow": clock.step("slow", 2.0)}
    ratio = timing.ratios_to_first(steps, rounds=9)["slow"]
    np.testing.assert_allclose([ratio.low, ratio.median, ratio.high], 3.0)


def test_median_and_interval_of_scattered_times(clock):
    times = np.random.default_rng(1).gamma(4.0, size=(200,))
    scattered = iter(times)
    steps = {
        "plain": clock.step("plain", 1.0),
        "scattered": clock.step("scattered", lambda: next(scattered)),
    }
    ratio = timing.ratios_to_first(steps, rounds=200, warm_up=0)["scattered"]
    assert ratio.rounds == 200
    assert ratio.median == pytest.approx(np.median(times))
    assert ratio.low < ratio.median < ratio.high
    # The exact 95 % interval of a median is between the order statistics of these ranks.
    ranks = np.array([-1, 1]) * 1.96 * np.sqrt(200 / 4) + 100
    found = [np.mean(times < ratio.low), np.mean(times < ratio.high)]
    np.testing.assert_allclose(found, ranks / 200, atol=0.008)


def test_outlier_does_not_move_the_median(clock):
    times = iter([3.0, 3.0, 300.0, 3.0, 3.0])
    steps = {"plain": clock.step("plain", 1.0), "slow": clock.step("slow", times.__next__)}
    assert timing.ratios_to_first(steps, rounds=5, warm_up=0)["slow"].median == 3.0


def test_real_clock():
    steps = {"one": lambda: sum(range(2000)), "many": lambda: sum(range(200_000))}
    ratios = timing.ratios_to_first(steps, rounds=5)
    assert ratios["one"].median == 1
    assert ratios["many"].median > 5
