"""What the matrix says for and against each method, in lines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from experiments.no_harm.comparison import (
    GAP_ABOVE_PLAIN,
    LARGEST_GAP,
    LAST_EPOCHS,
    MOVING,
    WIDEST,
    Comparison,
    half_width,
    mean_accuracy,
    mean_gap,
    of_method,
)
from experiments.no_harm.methods import COMPARED

#: A cell may lose so many points,
WORST_CELL = -1.0
#: and the mean over cells so many.
WORST_MEAN = -0.3


def lines(comparisons: list[Comparison]) -> list[str]:
    """Lines that begin with PASS, FAIL or NOT RUN: three criteria for each method."""
    return [line for name in COMPARED for line in _verdicts_of(name, comparisons)]


def _verdicts_of(name: str, comparisons: list[Comparison]) -> Iterator[str]:
    cells = of_method(comparisons, name)
    if not cells:
        yield f"NOT RUN {COMPARED[name].title}"
        return
    counted = _counted(name, cells)
    losses = [each for each in cells if each.difference < WORST_CELL]
    named = [f"{each.title} {_with_interval(each)}" for each in losses]
    wide = [f"{each.title} (seeds: {len(each.seeds)})" for each in cells if each.is_wide]
    if wide:
        named.append(f"undecided, half-width above {WIDEST:.1f}: {', '.join(wide)}")
    yield _verdict(not losses, f"{counted}: no cell below {WORST_CELL:.1f} points", *named)
    mean = statistics.mean(each.difference for each in cells)
    yield _verdict(
        mean >= WORST_MEAN,
        f"{counted}: mean over cells at least {WORST_MEAN:.1f} points",
        f"{mean:+.2f}",
    )
    yield gap_verdict(name, cells)


def clear_differences(comparisons: list[Comparison]) -> str:
    """Markdown: how many intervals lie to one side of zero, and all of those below it."""
    parts = []
    for title, name in (
        ("After the last epoch", "differences"),
        (f"Mean of the last {LAST_EPOCHS} epochs", "differences_of_last_epochs"),
    ):
        above, below = 0, []
        for each in comparisons:
            differences = getattr(each, name)
            mean, width = statistics.mean(differences), half_width(differences)
            above += mean - width > 0
            if mean + width < 0:
                method = COMPARED[each.method].title
                below.append((mean, f"{method}, {each.title} {_interval(differences, 2)}"))
        named = "; ".join(line for _, line in sorted(below)) or "none"
        parts.append(f"* {title}: {above} above, {len(below)} below zero. Below: {named}.")
    return "\n".join(parts)


def clear_gaps(comparisons: list[Comparison]) -> str:
    """Markdown: how many gaps are too large, by chance too, and all that clearly are."""
    failed = [each for each in comparisons if each.has_large_gap()]
    clear = [
        f"{COMPARED[each.method].title}, {each.title} {_interval(differences, 1)}"
        for each in failed
        for differences in (each.gap_differences(),)
        if statistics.mean(differences) - half_width(differences) > GAP_ABOVE_PLAIN
    ]
    chance = sum(each.chance_of_a_large_gap for each in comparisons)
    return (
        f"* Too large in {len(failed)} of {len(comparisons)} cells; baselines beside "
        f"themselves: in about {chance:.0f}.\n"
        f"* Clearly more than {GAP_ABOVE_PLAIN:.0f} above the baseline's: "
        f"{'; '.join(clear) or 'none'}."
    )


def gap_verdict(name: str, cells: list[Comparison], inference: str = MOVING) -> str:
    """A line on the gap of a method's cells, with those where it is too large."""
    gaps = [each for each in cells if each.has_large_gap(inference)]
    return _verdict(
        not gaps,
        f"{_counted(name, cells)}: inference at most {LARGEST_GAP:.0f} points below "
        f"training after one epoch, or the baseline's gap + {GAP_ABOVE_PLAIN:.0f}",
        *(f"{each.title} {_both_gaps(each, inference)}" for each in gaps),
    )


def _both_gaps(cell: Comparison, inference: str) -> str:
    """The gap and the baseline's, and the difference with its 95 % interval."""
    own, baseline = (_by_mode(each, inference) for each in (cell.found, cell.baseline))
    return f"{own}, baseline {baseline}, {_interval(cell.gap_differences(inference), 1)}"


def _with_interval(cell: Comparison) -> str:
    """The difference, with its 95 % interval, and that of the last epochs."""
    steadier = f"last {LAST_EPOCHS} epochs {cell.difference_of_last_epochs:+.2f}"
    return f"{_interval(cell.differences, 2)} ({steadier})"


def _interval(differences: list[float], digits: int) -> str:
    """The mean of differences by seed, with half its 95 % interval."""
    width = half_width(differences)
    shown = " of one seed" if math.isinf(width) else f" ± {width:.{digits}f}"
    return f"{statistics.mean(differences):+.{digits}f}{shown}"


def _by_mode(found: list[dict], inference: str) -> str:
    """The gap, and the accuracies that it lies between."""
    accuracies = (mean_accuracy(found, mode) for mode in ("training", inference))
    between = " to ".join(f"{each:.1f}" for each in accuracies)
    return f"{mean_gap(found, inference=inference):.1f} ({between} %)"


def _counted(name: str, cells: list[Comparison]) -> str:
    """The method, and how many cells it has, as "static DNS (2 cells)"."""
    number = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
    return f"{COMPARED[name].title} ({number})"


def _verdict(passed: bool, what: str, *named: str) -> str:
    line = f"{'PASS' if passed else 'FAIL'} {what}"
    return f"{line}: {'; '.join(named)}" if named else line
