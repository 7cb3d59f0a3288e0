"""A picture of one prediction taken apart: neighbors, weights, and their effects."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.training import data
from nsl_keras.visualize import figures

#: The maximum of outputs that are drawn: the most probable, or the most changed.
_MOST_OUTPUTS = 12

#: The smallest change with the darkest colors: of a logit, or of a regression's outputs
#: relative to the largest.
LEAST_CHANGE = 0.01


def plot_adaptation(
    model: MetaNeighborhoodModel,
    example: Any,
    k: int = 6,
    images: Any = None,
    class_names: Sequence[str] | None = None,
) -> figures.Figure:
    """Draws what adaptation does to one prediction: neighbors, weights, and effects.

    The top shows the prediction before and after adaptation. Below it are the `k` entries
    that moved the prediction most, with their attention, and what each entry adds to every
    logit (see `MetaNeighborhoodModel.neighbors`). The total of all other entries and the
    sum follow. The title says "no effect" if no logit changes by 0.01, or no output of a
    regression by 1 %.

    Args:
        model: A built `MetaNeighborhoodModel`. A regressor's outputs are drawn as they are.
        example: One input without batch axis, or a list or dict of inputs. The first input
            that is an image is drawn.
        k: int, the number of entries, at most `num_neighbors`.
        images: Training images, in the form of `x` of `plot_neighbors`, or `None`. The
            image nearest to each entry is drawn beside the entry.
        class_names: Names of the classes or outputs; `None` numbers them. At most 12 are
            drawn: the most probable, or in a regression the most changed.

    Raises:
        ValueError: If `k` is not in `1..num_neighbors`, the model is not built, or
            `example` has a batch axis.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=12)
    >>> x = np.random.default_rng(0).normal(size=(30, 6)).astype("float32")
    >>> model.build(x.shape)
    >>> figure = nsl_keras.visualize.plot_adaptation(model, x[0], k=4)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.1, Eq. (3).
    """
    figures.require_neighbors(model)
    batch = figures.batch_of_one(example)
    found = model.neighbors(batch, k, by="effect")
    entries, weights, values, effects, before, after = (part[0] for part in found)
    names = figures.names_of(len(before), class_names)
    change = after - before
    changes = np.stack([*effects, change - effects.sum(axis=0), change])
    rows = [f"entry {entry}" for entry in entries]
    unit, importance = "output", np.abs(change)
    least = LEAST_CHANGE * max(float(np.abs(before).max()), 1e-12)
    if model.task == "classification":
        before, after = map(ops.convert_to_numpy, map(ops.softmax, (before, after)))
        unit, importance, least = "logit", np.maximum(before, after), LEAST_CHANGE
        tops = (f"{names[each.argmax()]}, {100 * each.max():.0f} %" for each in values)
        rows = [f"{row}: {top}" for row, top in zip(rows, tops, strict=True)]
    rows += [f"{model.num_neighbors - k} others", "sum"]
    drawn = np.sort(np.argsort(-importance, kind="stable")[:_MOST_OUTPUTS])
    names = [textwrap.fill(names[index], 16) for index in drawn]

    widths = [1.3, 3.2, max(0.6 * len(names), 3.0) + 0.8]
    heights = [1.9, 0.45 * len(rows)]
    figure = figures.new_figure(sum(widths), sum(heights) + 1.0)
    axes = figure.subplot_mosaic(
        [["example", ".", "outputs"], ["nearest", "weights", "changes"]],
        width_ratios=widths,
        height_ratios=heights,
    )
    _draw_outputs(axes["outputs"], before[drawn], after[drawn], names, unit)
    _draw_weights(axes["weights"], np.append(weights, max(1 - weights.sum(), 0)), rows)
    scale = max(float(np.abs(changes[:, drawn]).max()), least)
    colors = figures.draw_matrix(axes["changes"], changes[:, drawn], scale, table=True)
    title = f"change of each {unit}" + (": no effect" if scale == least else "")
    axes["changes"].set_title(title, fontsize=9)
    is_short = max(map(len, names)) <= 6
    slant = {} if is_short else {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    axes["changes"].set_xticks(range(len(names)), names, fontsize=8, **slant)
    figures.add_color_bar(figure, colors, axes["changes"], f"change of the {unit}")

    picture = figures.images_in(model, batch)
    inputs = batch if images is None else data.gather(images)[0]
    pictures = figures.images_in(model, inputs)
    axes["example"].set_axis_off()
    axes["nearest"].set_axis_off()
    if picture is None or pictures is None:
        return figure
    shown = figures.display_range(picture, pictures)
    figures.draw_image(axes["example"], picture[0], shown, "example")
    if images is not None:
        axes["nearest"].set_title("nearest image", fontsize=9)
        for row, index in enumerate(model.nearest_examples(inputs)[entries]):
            place = (0, 1 - (row + 0.95) / len(rows), 1, 0.9 / len(rows))
            panel = axes["nearest"].inset_axes(place)
            figures.draw_image(panel, pictures[index], shown)
    return figure


def _draw_outputs(
    axis: figures.Axes, before: np.ndarray, after: np.ndarray, names: list[str], unit: str
) -> None:
    """Draws outputs before and after adaptation as bars."""
    for shift, outputs, color, when in (
        (-0.2, before, figures.GREY, "before"),
        (0.2, after, figures.BLUE, "after"),
    ):
        top = int(outputs.argmax())
        if unit == "logit":
            when = f"{when}: {names[top]}, {100 * outputs[top]:.0f} %"
        axis.bar(np.arange(len(names)) + shift, outputs, 0.38, color=color, label=when)
    axis.set_ylabel("probability" if unit == "logit" else "output", fontsize=9)
    axis.set(xlim=(-0.5, len(names) - 0.5), xticks=[])
    axis.legend(fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    figures.frame_bars(axis)


def _draw_weights(axis: figures.Axes, weights: np.ndarray, rows: list[str]) -> None:
    """Draws the attention weights of entries, and of all others, as bars."""
    axis.barh(range(len(weights)), weights, color=figures.ORANGE, height=0.6)
    axis.set_yticks(range(len(rows)), [textwrap.fill(row, 24) for row in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_title("attention weight", fontsize=9)
    figures.frame_bars(axis)
