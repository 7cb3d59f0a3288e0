"""Tables, picture and verdicts of the do-no-harm matrix, from the files of its runs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from matplotlib.figure import Figure

from benchmarks.no_harm.comparison import (
    ESTIMATED,
    GAP_ABOVE_PLAIN,
    LARGEST_GAP,
    LAST_EPOCHS,
    MOVING,
    WIDEST,
    Comparison,
    compare,
    half_width,
    mean_accuracy,
    mean_gap,
    of_method,
    test_accuracy,
)
from benchmarks.no_harm.data import DATASETS, TEST_IMAGES
from benchmarks.no_harm.methods import COMPARED, METHODS
from benchmarks.no_harm.networks import MOMENTUM, NETWORKS
from examples.common import runs, tables
from nsl_keras import files

#: A cell may lose so many points,
WORST_CELL = -1.0
#: and the mean over cells so many.
WORST_MEAN = -0.3
#: Where the picture's colours end.
FULL_COLOUR = 5.0


class Matrix(NamedTuple):
    """Networks with one kind of batch norm, and those without any.

    Attributes:
        owner: Whose batch norms they are.
        place: Folder of the runs.
        picture: File of the differences.
    """

    owner: str
    place: str
    picture: str


#: By the batch norms of the networks, in the order of the report.
MATRICES = {
    "unbiased": Matrix("this package's", "runs_unbiased", "no_harm.png"),
    "keras": Matrix("Keras's", "runs", "no_harm_keras.png"),
}


def load(folder: pathlib.Path, batch_norm: str) -> list[dict]:
    """Returns the runs of a matrix. Those without batch norm are the same in each."""
    found = runs.RunRecords(folder / MATRICES[batch_norm].place).runs
    if batch_norm == "keras" or not found:
        return found
    return [*found, *itertools.filterfalse(_has_batch_norm, load(folder, "keras"))]


def _has_batch_norm(run: dict) -> bool:
    return NETWORKS[run["network"]].batch_norm


def verdicts(comparisons: list[Comparison]) -> list[str]:
    """Lines that begin with PASS, FAIL or NOT RUN: three criteria for each method."""
    return [line for name in COMPARED for line in _verdicts_of(name, comparisons)]


def _verdicts_of(name: str, comparisons: list[Comparison]) -> Iterator[str]:
    title, cells = COMPARED[name].title, of_method(comparisons, name)
    if not cells:
        yield f"NOT RUN {title}"
        return
    counted = f"{title} ({_count(cells)})"
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
    yield _gap_verdict(counted, cells)


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


def _gap_verdict(counted: str, cells: list[Comparison], inference: str = MOVING) -> str:
    gaps = [each for each in cells if each.has_large_gap(inference)]
    return _verdict(
        not gaps,
        f"{counted}: inference at most {LARGEST_GAP:.0f} points below training after one "
        f"epoch, or the baseline's gap + {GAP_ABOVE_PLAIN:.0f}",
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


def _count(cells: list[Comparison]) -> str:
    return "1 cell" if len(cells) == 1 else f"{len(cells)} cells"


def _verdict(passed: bool, what: str, *named: str) -> str:
    line = f"{'PASS' if passed else 'FAIL'} {what}"
    return f"{line}: {'; '.join(named)}" if named else line


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
                f"{statistics.median(each.step_time for each in cells):.2f}x",
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
        _gap_verdict(f"{method.title} ({_count(own)})", own, ESTIMATED)
        for name, method in COMPARED.items()
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
                f"{cell.step_time:.2f}x" if cell else "",
                tables.seeds(own),
            ]
        )
    return tables.markdown(columns, rows)


def plot_differences(comparisons: list[Comparison]) -> Figure:
    """Draws the differences, methods by cells: blue gains, red loses."""
    columns = list(dict.fromkeys((each.dataset, each.network) for each in comparisons))
    names = [name for name in COMPARED if of_method(comparisons, name)]
    values = {
        (each.method, (each.dataset, each.network)): each.difference for each in comparisons
    }
    figure = Figure(
        figsize=(4.4 + 0.62 * len(columns), 2.6 + 0.42 * len(names)), layout="constrained"
    )
    axes = figure.add_subplot()
    axes.set_facecolor("0.9")
    drawn = [[values.get((name, column), math.nan) for column in columns] for name in names]
    image = axes.imshow(
        drawn, cmap="RdBu", vmin=-FULL_COLOUR, vmax=FULL_COLOUR, aspect="auto"
    )
    for row, name in enumerate(names):
        for column, cell in enumerate(columns):
            value = values.get((name, cell))
            suited = COMPARED[name].suits(NETWORKS[cell[1]])
            text = (
                f"{round(value, 1) + 0:+.1f}"
                if value is not None
                else ("" if suited else "n/a")
            )
            dark = value is not None and abs(value) > 0.6 * FULL_COLOUR
            axes.text(
                *(column, row, text),
                ha="center",
                va="center",
                fontsize=9,
                color="white" if dark else "black",
                weight="bold" if value is not None and value < WORST_CELL else "normal",
            )
    axes.set_yticks(range(len(names)), [COMPARED[name].title for name in names])
    axes.set_xticks(
        range(len(columns)),
        [
            f"{DATASETS[dataset].title}\n{NETWORKS[network].title}"
            for dataset, network in columns
        ],
        rotation=60,
        ha="right",
        rotation_mode="anchor",
        fontsize=8,
    )
    for column in range(1, len(columns)):
        if columns[column][0] != columns[column - 1][0]:
            axes.axvline(column - 0.5, color="black", linewidth=1)
    axes.tick_params(length=0)
    bar = figure.colorbar(image, extend="both")
    bar.set_label("test accuracy above the plain network's, points")
    return figure


def page(found: dict[str, list[dict]], setting: dict) -> str:
    """Markdown of the whole report, of the runs by batch norm."""
    comparisons = {name: compare(found[name]) for name in MATRICES}
    sections = "\n\n".join(
        matrix_section(matrix, comparisons[name]) for name, matrix in MATRICES.items()
    )
    cells = "\n\n".join(
        f"## Cells: {matrix.owner} batch norms\n\n"
        f"{cell_tables(filter(_has_batch_norm, found[name]), comparisons[name])}"
        for name, matrix in MATRICES.items()
    )
    unbiased, with_keras = MATRICES["unbiased"], MATRICES["keras"]
    without = itertools.filterfalse(_has_batch_norm, found["keras"])
    return f"""# Do no harm

Does a method of this package, used naively and with every default, make a first training
worse than that of the plain network? Written by `python -m benchmarks.no_harm --report`.

Two matrices: networks with `nsl_keras.layers.BatchNormalization`, which this package's
backbones have (`--batch_norm=unbiased`, in `{unbiased.place}/`), and the same networks
with `keras.layers.BatchNormalization` (in `{with_keras.place}/`). The networks without
batch norm are part of both, with the same runs.

Adam at {setting["learning_rate"]:g}, {setting["epochs"]} epochs, batches of
{setting["batch_size"]}, images in [0, 1], no augmentation. Accuracies are those on test
images at the end, in percent, mean ± standard deviation over seeds. At most
{TEST_IMAGES:,} test images are used, always the same. Differences are in points, to the
plain network of the same training images, order and, where a method has them, start
weights; half-widths are those of the 95 % interval (paired t). The difference of the last
{LAST_EPOCHS} epochs is that of the mean accuracies after each of them: where batch norms
jitter, one epoch says little. What is converted from a trained network is trained for as
many epochs again, with a new optimizer, and so is the plain network that it is compared
with.

The gap is the accuracy in training mode above that in inference mode, in points, on the
same {setting["compared_images"]} training images. In training mode batch norms normalize
by batches; dictionaries are complete in both modes. The batch norms of the networks have a
momentum of {MOMENTUM:g}. Step times are ratios to the plain network's.

In the verdicts a loss has half its 95 % interval beside it, and the difference of the last
{LAST_EPOCHS} epochs. A gap has the accuracies in both modes beside it, and by how much it
is above the baseline's, with half the 95 % interval. How often a baseline's gap would be
too large beside itself is found by drawing the seeds of both sides from the baseline's own
runs in each cell, with replacement. In the tables of methods, differences are means ±
standard deviations over the cells, and gaps are means over them.

{sections}

## The gap, by the batch norms of the network

Mean gaps after one epoch over the cells that both matrices have, but those without batch
norm; in brackets those of the baselines. Seeds are those of a cell.

"Estimated anew" means that the moving averages of this package's batch norms are replaced
by the means of the statistics that the final weights give on the batches of these images.
What is then left of a gap is not a matter of moving averages.

{gap_section(comparisons["keras"], comparisons["unbiased"])}

{cells}

## Cells: no batch norms

{cell_tables(without, comparisons["keras"])}
"""


def matrix_section(matrix: Matrix, comparisons: list[Comparison]) -> str:
    """Markdown: picture, verdicts, what is beyond chance, and a table of the methods."""
    title = f"## With {matrix.owner} batch norms"
    if not comparisons:
        return f"{title}\n\nNot run."
    chance = 0.025 * len(comparisons)
    lines = "\n".join(verdicts(comparisons))
    return f"""{title}

![Differences to the plain network]({matrix.picture})

{summary_table(comparisons)}

Differences whose 95 % interval does not hold zero. Of {len(comparisons)} differences
chance alone would put about {chance:.0f} above and as many below.

{clear_differences(comparisons)}

Gaps after one epoch:

{clear_gaps(comparisons)}

Verdicts:

```
{lines}
```"""


def write(folder: pathlib.Path) -> None:
    """Writes page and pictures of the runs in a folder, and prints the verdicts.

    Raises:
        ValueError: If there are no two runs to compare.
    """
    found = {name: load(folder, name) for name in MATRICES}
    settings = [runs.RunRecords(folder / each.place).setting for each in MATRICES.values()]
    comparisons = {name: compare(its) for name, its in found.items()}
    if not any(comparisons.values()):
        raise ValueError(
            f"`output_dir` must hold runs of a method and of its baseline. Received: "
            f"{folder} with {sum(map(len, found.values()))} runs"
        )
    setting = next(each for each in settings if each is not None)
    with files.replacing(folder / "README.md") as scratch:
        scratch.write_text(page(found, setting))
    print(f"Wrote {folder / 'README.md'}")
    for name, matrix in MATRICES.items():
        if comparisons[name]:
            print(f"\nWith {matrix.owner} batch norms:")
            print("\n".join(verdicts(comparisons[name])))
            with files.replacing(folder / matrix.picture) as scratch:
                plot_differences(comparisons[name]).savefig(scratch, dpi=150)
            print(f"Wrote {folder / matrix.picture}")
