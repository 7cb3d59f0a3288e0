"""The page of the do-no-harm matrix, from the files of its runs."""

from __future__ import annotations

import itertools
import pathlib
from typing import NamedTuple

from experiments.common import runs
from experiments.no_harm import picture, report_tables, verdicts
from experiments.no_harm.comparison import LAST_EPOCHS, Comparison, compare
from experiments.no_harm.data import TEST_IMAGES
from experiments.no_harm.networks import MOMENTUM, NETWORKS
from nsl_keras.training import files


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


def page(found: dict[str, list[dict]], setting: dict) -> str:
    """Markdown of the whole report, of the runs by batch norm."""
    comparisons = {name: compare(found[name]) for name in MATRICES}
    sections = "\n\n".join(
        matrix_section(matrix, comparisons[name]) for name, matrix in MATRICES.items()
    )
    with_batch_norm = {name: filter(_has_batch_norm, found[name]) for name in MATRICES}
    cells = "\n\n".join(
        f"## Cells: {matrix.owner} batch norms\n\n"
        f"{report_tables.cell_tables(with_batch_norm[name], comparisons[name])}"
        for name, matrix in MATRICES.items()
    )
    unbiased, with_keras = MATRICES["unbiased"], MATRICES["keras"]
    without = itertools.filterfalse(_has_batch_norm, found["keras"])
    return f"""# Do no harm

Does a method of this package, used naively and with every default, make a first training
worse than that of the plain network? Written by `python -m experiments.no_harm --report`.

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
momentum of {MOMENTUM:g}.

Step times are ratios to the plain network's, the median over the seeds whose two runs one
command made. They are unknown where there is no such seed: runs of two commands may be of
machines of different speed.

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

{report_tables.gap_section(comparisons["keras"], comparisons["unbiased"])}

{cells}

## Cells: no batch norms

{report_tables.cell_tables(without, comparisons["keras"])}
"""


def matrix_section(matrix: Matrix, comparisons: list[Comparison]) -> str:
    """Markdown: picture, verdicts, what is beyond chance, and a table of the methods."""
    title = f"## With {matrix.owner} batch norms"
    if not comparisons:
        return f"{title}\n\nNot run."
    chance = 0.025 * len(comparisons)
    lines = "\n".join(verdicts.lines(comparisons))
    return f"""{title}

![Differences to the plain network]({matrix.picture})

{report_tables.summary_table(comparisons)}

Differences whose 95 % interval does not hold zero. Of {len(comparisons)} differences
chance alone would put about {chance:.0f} above and as many below.

{verdicts.clear_differences(comparisons)}

Gaps after one epoch:

{verdicts.clear_gaps(comparisons)}

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
            print("\n".join(verdicts.lines(comparisons[name])))
            with files.replacing(folder / matrix.picture) as scratch:
                picture.plot_differences(comparisons[name]).savefig(scratch, dpi=150)
            print(f"Wrote {folder / matrix.picture}")
