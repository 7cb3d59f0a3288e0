"""The picture of the do-no-harm matrix."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from experiments.no_harm.comparison import Comparison, of_method
from experiments.no_harm.data import DATASETS
from experiments.no_harm.methods import COMPARED
from experiments.no_harm.networks import NETWORKS
from experiments.no_harm.verdicts import WORST_CELL

#: Where the colours end.
FULL_COLOUR = 5.0


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
