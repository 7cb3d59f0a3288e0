"""The page of the do-no-harm matrix, from the records of its runs."""

import itertools
import pathlib
import statistics

from experiments.common import runs, tables
from experiments.no_harm import comparison
from experiments.no_harm.comparison import LAST_EPOCHS, Comparison, compare
from experiments.no_harm.data import DATASETS, TEST_IMAGES
from experiments.no_harm.methods import COMPARED, OWN, PLAIN
from experiments.no_harm.networks import MOMENTUM, NETWORKS
from experiments.no_harm.training import Setting

PLACE = "no_harm.jsonl"
#: Whose batch norms the networks have, in the order of the page.
OWNERS = {"unbiased": "this package's", "keras": "Keras's"}


def load(results: pathlib.Path, batch_norm: str) -> list[dict]:
    """Returns the runs of a matrix. Those without batch norm are the same in each."""
    found = runs.RunRecords(results / PLACE, batch_norm).runs
    if batch_norm == "keras" or not found:
        return found
    others = load(results, "keras")
    return found + [run for run in others if not NETWORKS[run["network"]].batch_norm]


def page(results: pathlib.Path) -> str:
    setting = Setting()
    large, above = comparison.LARGEST_GAP, comparison.GAP_ABOVE_PLAIN
    sections = [_section(owner, load(results, name)) for name, owner in OWNERS.items()]
    text = f"""# Do no harm

Does a method of this package, used with every default, make a first training worse than
that of the plain network? `python -m experiments.no_harm` wrote `results/{PLACE}`; a matrix
has networks with one kind of batch norm, and the same runs of networks without any.

Adam at {setting.learning_rate:g}, {setting.epochs} epochs, batches of {setting.batch_size}
images in [0, 1], no augmentation, batch norms with a momentum of {MOMENTUM:g}; at most
{TEST_IMAGES:,} test images, always the same. Accuracies are in percent at the end, mean ±
standard deviation over seeds. Differences are in points, to the plain network of the same
training images, order and, where a method has them, start weights, and of the same commit
if there are several. Where batch norms
jitter, one epoch says little: see also the mean over the last {LAST_EPOCHS} epochs. What is
converted from a trained network is trained for as many epochs again, with a new optimizer,
and so is the plain network that it is compared with. The first rows are plain networks too:
what you can do without a similarity or neighbors. "An M at each position" is no default;
neither is the `freeze_backbone=False` of what is converted to a similarity.

The gap is the accuracy in training mode above that in inference mode, in points, on the
same training images. It is too large above {large:g} points, and above the baseline's
by more than {above:g}. Step times are ratios to the plain network's, the median
over the seeds whose two runs one command made, "unknown" where there is none."""
    return "\n\n".join([text, *sections]) + "\n"


def _section(owner: str, found: list[dict]) -> str:
    comparisons = compare(found)
    own = [each for each in comparisons if each.method in OWN]
    (above, below), (above_of_last, below_of_last) = (
        [sum(sign * c.difference(n) > c.half_width(n) for c in own) for sign in (1, -1)]
        for n in (1, LAST_EPOCHS)
    )
    large = sum(each.has_large_gap for each in own)
    return f"""## With {owner} batch norms

Means over the cells:

{summary_table(comparisons)}

The whole 95 % interval of {above} of the {len(own)} differences of this package's methods
lies above zero, of {below} below; over the last {LAST_EPOCHS} epochs of {above_of_last}
above and of {below_of_last} below. Chance alone would put about
{0.025 * len(own):.0f} on either side. The gap after one epoch is too large in {large} of
these cells.

Each cell: accuracy of the plain network, differences ± half their 95 % interval, in bold
where it does not hold zero:

{_cell_table(found, comparisons)}

Made by {tables.commits(found)}."""


def summary_table(comparisons: list[Comparison]) -> str:
    """Markdown: a row a method, over all its cells."""
    columns = ["method", "cells", "mean difference", "largest loss", "largest gain"]
    columns += [f"mean, last {LAST_EPOCHS} epochs"]
    columns += ["gap after one epoch", "its baseline's", "gap at the end"]
    columns += ["its baseline's", "step time"]
    rows = []
    for name, method in COMPARED.items():
        cells = [each for each in comparisons if each.method == name]
        if not cells:
            rows.append([method.title, "not run"])
            continue
        worst, *_, best = sorted([*cells, cells[0]], key=Comparison.difference)
        gaps = [
            statistics.mean(comparison.mean_gap(getattr(c, of), epoch) for c in cells)
            for epoch in ("first_epoch", "last_epoch")
            for of in ("found", "baseline")
        ]
        known = [statistics.median(cell.step_times) for cell in cells if cell.step_times]
        rows.append(
            [
                method.title,
                str(len(cells)),
                f"{statistics.mean(each.difference() for each in cells):+.2f}",
                _named(worst) if worst.difference() < 0 else "none",
                _named(best) if best.difference() > 0 else "none",
                f"{statistics.mean(each.difference(LAST_EPOCHS) for each in cells):+.2f}",
                *(f"{gap:.1f}" for gap in gaps),
                f"{statistics.median(known):.2f}x" if known else "unknown",
            ]
        )
    return tables.markdown(columns, rows)


def _named(cell: Comparison) -> str:
    return f"{cell.difference():+.2f} ({cell.title})"


def _cell_table(found: list[dict], comparisons: list[Comparison]) -> str:
    """Markdown: a row a cell, a column a method."""
    rows = []
    for place in itertools.product(DATASETS, NETWORKS):
        cells = {c.method: c for c in comparisons if (c.dataset, c.network) == place}
        if not cells:
            continue
        plain = tables.of_method(found, PLAIN)
        newest = {
            run["seed"]: run for run in plain if (run["dataset"], run["network"]) == place
        }.values()
        title = f"{DATASETS[place[0]].title}, {NETWORKS[place[1]].title}"
        shown = [_difference(cells[n]) if n in cells else "" for n in COMPARED]
        accuracies = map(comparison.test_accuracy, newest)
        rows.append([title, tables.mean(accuracies), *shown])
    columns = ["cell", "plain", *(method.title for method in COMPARED.values())]
    return tables.markdown(columns, rows)


def _difference(cell: Comparison) -> str:
    shown = cell.interval()
    return f"**{shown}**" if abs(cell.difference()) > cell.half_width() else shown
