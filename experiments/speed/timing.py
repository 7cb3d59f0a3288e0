"""Times as ratios to a baseline, measured side by side.

Absolute times move with whatever else a machine does. Rounds that run every candidate
once, and the median of the per-round ratios, do not.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def ratios_to_first(
    steps: Mapping[str, Callable[[], Any]], rounds: int = 15, **options: Any
) -> dict[str, dict[str, Any]]:
    """Relates times of callables, each of which waits for its result, to the first's.

    Returns medians and their 95 % intervals.

    The rounds are interleaved, and the first ones, which trace and compile, do not count.
    """
    relative = _relative([*steps.values()], rounds, **options)
    resampled = np.random.default_rng(0).integers(0, rounds, size=(1000, rounds))
    medians = np.median(relative[resampled], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5], axis=0)
    found = zip(np.median(relative, axis=0), low, high, strict=True)
    names = ("median", "low", "high")
    return {
        name: dict(zip(names, map(float, each), strict=True)) | {"rounds": rounds}
        for name, each in zip(steps, found, strict=True)
    }


def step_time_ratio(model: Any, plain: Any, batch: tuple) -> dict[str, float]:
    """The time of a training step over the plain model's: median and quartiles.

    Rounds of one step each, one after the other, in this process. It trains both.
    """
    steps = [lambda each=each: each.train_on_batch(*batch) for each in (plain, model)]
    ratios = _relative(steps)[:, 1]
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75)).round(3).tolist()
    return {"median": median, "low": low, "high": high}


def _relative(
    steps: Sequence[Callable[[], Any]],
    rounds: int = 15,
    warm_up: int = 2,
    calls_per_round: int = 1,
    clock: str = "perf_counter",
) -> np.ndarray:
    """Times over the first step's: a line a round."""
    times = np.empty((warm_up + rounds, len(steps)))
    for line in times:
        for column, step in enumerate(steps):
            start = getattr(time, clock)()
            for _ in range(calls_per_round):
                step()
            line[column] = getattr(time, clock)() - start
    return (times / times[:, :1])[warm_up:]
