"""Times as ratios to a baseline, measured side by side.

Absolute times move with whatever else a machine does. Rounds that run every candidate
once, and the median of the per-round ratios, do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Ratio(NamedTuple):
    """A candidate's time over the baseline's.

    Attributes:
        median: Median over the rounds.
        low: Lower end of its 95 % interval, from resampled rounds.
        high: Upper end of that interval.
        rounds: Number of rounds measured.
    """

    median: float
    low: float
    high: float
    rounds: int


def ratios_to_first(
    steps: Mapping[str, Callable[[], Any]],
    rounds: int = 15,
    warm_up: int = 2,
    calls_per_round: int = 1,
) -> dict[str, Ratio]:
    """Runs callables in interleaved rounds and relates their times to the first.

    Args:
        steps: Callables by name, the baseline first. Each must wait for its result.
        rounds: int, the number of rounds measured.
        warm_up: int, the number of rounds before, not measured (tracing, compilation).
        calls_per_round: int, calls of each callable in a round, timed together.

    Returns:
        A `Ratio` by name; the first one is 1.

    Example:

    >>> from experiments.speed import timing
    >>> ratios = timing.ratios_to_first({"one": lambda: sum(range(1000)),
    ...                                  "ten": lambda: sum(range(10000))})
    >>> ratios["one"].median, ratios["ten"].median > 2
    (1.0, True)
    """
    for _ in range(warm_up):
        for step in steps.values():
            step()
    times = np.empty((rounds, len(steps)))
    for index in range(rounds):
        for column, step in enumerate(steps.values()):
            start = time.perf_counter()
            for _ in range(calls_per_round):
                step()
            times[index, column] = time.perf_counter() - start
    relative = times / times[:, :1]
    resampled = np.random.default_rng(0).integers(0, rounds, size=(1000, rounds))
    medians = np.median(relative[resampled], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5], axis=0)
    return {
        name: Ratio(
            float(np.median(relative[:, column])),
            float(low[column]),
            float(high[column]),
            rounds,
        )
        for column, name in enumerate(steps)
    }


def step_time_ratio(model: Any, plain: Any, batch: tuple) -> dict[str, float]:
    """The time of a training step over the plain model's: median and quartiles.

    Rounds of one step each, one after the other, in this process. It trains both.
    """
    warm_up, rounds = 2, 15
    ratios = []
    for number in range(warm_up + rounds):
        times = []
        for each in (plain, model):
            start = time.perf_counter()
            each.train_on_batch(*batch)
            times.append(time.perf_counter() - start)
        if number >= warm_up:
            ratios.append(times[1] / times[0])
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75)).round(3).tolist()
    return {"median": median, "low": low, "high": high}
