"""Tables of the do-no-harm matrix: of the methods, of the gap and of the cells."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable

from experiments.common import tables
from experiments.no_harm import verdicts
from experiments.no_harm.comparison import (
    ESTIMATED,
    LAST_EPOCHS,
    MOVING,
    Comparison,
    mean_gap,
    of_method,
    test_accuracy,
)
from experiments.no_harm.data import DATASETS
from experiments.no_harm.methods import COMPARED, METHODS
from experiments.no_harm.networks import NETWORKS


def summary_table(comparisons: list[Comparison]) -> str:
    """Markdown: a row a method, over all its cells."""
    columns = ["method", "cells", "mean difference", "largest loss", "largest gain"]
    columns += [f"mean, last {LAST_EPOCHS} epochs"]
    columns += ["gap after one epoch", "its baseline's", "gap at the end"]
    columns += ["its baseline's", "step time"]
    rows = []
    for name, method in COMPARED.items():
        cells = of_method(comparisons, name)
        if not cells:
            rows.append([method.title, "not run"])
            continue
        worst = min(cells, key=lambda each: each.difference)
        best = max(cells, key=lambda each: each.difference)
        rows.append(
            [
                method.title,
                str(len(cells)),
                tables.mean((each.difference for each in cells), "+"),
                _named(worst) if worst.difference < 0 else "none",
                _named(best) if best.difference > 0 else "none",
                f"{statistics.mean(each.difference_of_last_epochs for each in cells):+.2f}",
                *_mean_gaps(cells, "first_epoch"),
                *_mean_gaps(cells, "last_epoch"),
                _step_time(cells),
            ]
        )
    return tables.markdown(columns, rows)


def _named(cell: Comparison) -> str:
    return f"{cell.difference:+.2f} ({cell.title})"


def _mean_gaps(cells: list[Comparison], epoch: str, inference: str = MOVING) -> list[str]:
    of_both: tuple[Callable, ...] = (lambda each: each.found, lambda each: each.baseline)
    return [
        f"{statistics.mean(mean_gap(of(each), epoch, inference) for each in cells):.1f}"
        for of in of_both
    ]


def _step_time(cells: list[Comparison]) -> str:
    """The median of the cells where it is known."""
    known = [each.step_time for each in cells if each.step_time is not None]
    return f"{statistics.median(known):.2f}x" if known else "unknown"


def gap_section(with_keras: list[Comparison], unbiased: list[Comparison]) -> str:
    """Markdown: the gap by the batch norms of the networks, in the cells that have both."""
    both = {
        key
        for key in {_place(each) for each in with_keras}
        & {_place(each) for each in unbiased}
        if NETWORKS[key[1]].batch_norm
    }
    with_keras, unbiased = (
        [each for each in cells if _place(each) in both] for cells in (with_keras, unbiased)
    )
    if not both:
        return "Not run."
    estimated = [each for each in map(_estimated, unbiased) if each.found]
    measures = [
        ("Keras's batch norms", with_keras, MOVING),
        ("this package's", unbiased, MOVING),
        ("estimated anew", estimated, ESTIMATED),
    ]
    columns = ["method"]
    for title, *_ in measures:
        columns += [title, "of them too large", "cells", "seeds"]
    rows = [
        [
            method.title,
            *(
                column
                for _, cells, inference in measures
                for column in _gap_columns(of_method(cells, name), inference)
            ),
        ]
        for name, method in COMPARED.items()
    ]
    lines = [
        verdicts.gap_verdict(name, own, ESTIMATED)
        for name in COMPARED
        if (own := of_method(estimated, name))
    ]
    block = "\n".join(["```", *(lines or ["NOT RUN"]), "```"])
    return f"{tables.markdown(columns, rows)}\n\nEstimated anew:\n\n{block}"


def _estimated(cell: Comparison) -> Comparison:
    """The seeds whose runs have an accuracy with statistics that are estimated anew."""
    pairs = [
        pair
        for pair in zip(cell.found, cell.baseline, strict=True)
        if all(ESTIMATED in run["by_mode"]["first_epoch"] for run in pair)
    ]
    found, baseline = ([pair[place] for pair in pairs] for place in (0, 1))
    return dataclasses.replace(cell, found=found, baseline=baseline)


def _place(cell: Comparison) -> tuple[str, str, str]:
    return cell.dataset, cell.network, cell.method


def _gap_columns(cells: list[Comparison], inference: str) -> list[str]:
    """The mean gap and its baseline's, in how many cells it is too large, and seeds."""
    if not cells:
        return ["not run", "", "", ""]
    own, baseline = _mean_gaps(cells, "first_epoch", inference)
    counts = [len(each.seeds) for each in cells]
    return [
        f"{own} ({baseline})",
        str(sum(each.has_large_gap(inference) for each in cells)),
        str(len(cells)),
        f"{min(counts)} to {max(counts)}" if len({*counts}) > 1 else str(counts[0]),
    ]


def cell_tables(found: Iterable[dict], comparisons: list[Comparison]) -> str:
    """Markdown: a table a cell, with a row a method."""
    found = list(found)
    parts = []
    for dataset in DATASETS:
        for network in NETWORKS:
            own = [
                run
                for run in found
                if (run["dataset"], run["network"]) == (dataset, network)
            ]
            if own:
                title = f"### {DATASETS[dataset].title}, {NETWORKS[network].title}"
                compared = {
                    each.method: each
                    for each in comparisons
                    if (each.dataset, each.network) == (dataset, network)
                }
                parts.append(f"{title}\n\n{_cell_table(network, own, compared)}")
    return "\n\n".join(parts) or "Not run."


def _cell_table(network: str, found: list[dict], compared: dict[str, Comparison]) -> str:
    columns = ["method", "test accuracy", "difference", "95 % half-width"]
    columns += [f"last {LAST_EPOCHS} epochs"]
    columns += ["gap after one epoch", "gap at the end", "parameters", "step time", "seeds"]
    rows = []
    for name, method in METHODS.items():
        own = tables.of_method(found, name)
        if not own:
            suited = method.suits(NETWORKS[network])
            rows.append([method.title, "not run" if suited else "not applicable"])
            continue
        cell = compared.get(name)
        failed = sum("failed" in run for run in own)
        rows.append(
            [
                method.title + (f" (failed in {failed} of {len(own)})" if failed else ""),
                tables.mean(map(test_accuracy, own)),
                tables.mean(cell.differences, "+") if cell else "",
                f"{cell.half_width:.2f}" if cell and len(cell.found) > 1 else "",
                f"{cell.difference_of_last_epochs:+.2f}" if cell else "",
                f"{mean_gap(own):.1f}",
                f"{mean_gap(own, 'last_epoch'):.1f}",
                f"{own[0]['parameters']:,}",
                _step_time([cell]) if cell else "",
                tables.seeds(own),
            ]
        )
    return tables.markdown(columns, rows)
