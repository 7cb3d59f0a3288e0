"""Parts of Markdown tables: means over seeds, differences paired by seed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; rows that are too short end in empty cells."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        cells = [*row, *[""] * (len(columns) - len(row))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mean(values: Iterable[float], sign: str = "") -> str:
    """The mean, and the standard deviation of two or more."""
    values = list(values)
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.2f}{spread}"


def of_method(runs: list[dict], method: str) -> list[dict]:
    """The runs of a method."""
    return [run for run in runs if run["method"] == method]


def percent(runs: list[dict], method: str, key: str) -> dict[int, float]:
    """A share in percent by seed, of the runs of a method that have it."""
    return {run["seed"]: 100 * run[key] for run in of_method(runs, method) if key in run}


def difference(found: dict[int, float], baseline: dict[int, float]) -> str:
    """The mean difference over the seeds that both have."""
    return mean((found[seed] - baseline[seed] for seed in found if seed in baseline), "+")


def outcome(runs: list[dict], values: Iterable[float]) -> str:
    """The mean over the runs of a method, and how many diverged."""
    diverged = sum("diverged" in run for run in runs)
    note = f"diverged in {diverged} of {len(runs)}" if diverged else ""
    return "; ".join(each for each in (mean(values), note) if each)


def seeds(runs: list[dict]) -> str:
    """The seeds of the runs of a method."""
    return ", ".join(str(run["seed"]) for run in runs)


def commands(runs: list[dict]) -> str:
    """The commands that made the runs."""
    return "; ".join(dict.fromkeys(f"`{run['command']}`" for run in runs))


def images_per_second(runs: list[dict]) -> str:
    """The median over runs on accelerators: a CPU's moves with whatever else it does."""
    speeds = [
        run["images_per_second"]
        for run in runs
        if "diverged" not in run
        and not any(device.startswith("cpu") for device in run["devices"])
    ]
    return f"{statistics.median(speeds):,.0f}" if speeds else ""
