"""One prediction taken apart: the neighbours, their weights, and what each changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.neighborhoods.explain import Neighbors, attention_of, names_of
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.visualize.figures import (
    BLUE,
    GREY,
    ORANGE,
    display_range,
    draw_image,
    is_image,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: More columns than these leave no room for numbers.
_MOST_NUMBERED_OUTPUTS = 12


def adaptation(
    model: MetaNeighborhoodModel,
    example: Any,
    k: int = 6,
    images: Any = None,
    class_names: Sequence[str] | None = None,
) -> Figure:
    """Draws what a model does for one example: neighbours, weights, and their effects.

    Above: the prediction before and after adaptation. Below: the `k` entries with the
    largest attention weights, with what each adds to every logit (see
    `MetaNeighborhoodModel.neighbors`); then what all other entries add, and the sum.

    Args:
        model: A built `MetaNeighborhoodModel`; in regression its outputs are drawn.
        example: One input, without batch axis. An image is drawn.
        k: int, the number of entries; at most `num_neighbors`.
        images: Array of images, `(n, height, width, channels)`; beside each entry the one
            that looks at it most is drawn. `None` leaves them out.
        class_names: Names of the classes or outputs; `None` numbers them.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: If `k` is not in `1..num_neighbors`.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=12)
    >>> x = np.random.default_rng(0).normal(size=(30, 6)).astype("float32")
    >>> model.build(x.shape)
    >>> figure = nsl_keras.visualize.adaptation(model, x[0], k=4)
    >>> [axis.get_ylabel() for axis in figure.axes]
    ['probability', '', '', '', '']

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.1, Eq. (3).
    """
    k = validation.positive_integer(k, "k")
    example = np.asarray(example)
    found = Neighbors(*(part[0] for part in model.neighbors(example[None], k)))
    batch = ops.convert_to_tensor(example[None])
    before, after = (
        ops.convert_to_numpy(model(batch, training=False, adapt=adapt))[0]
        for adapt in (False, True)
    )
    names = names_of(len(before), class_names)
    widths = [1.6, 1.9, max(0.55 * len(names), 2.4)]
    heights = [1.6, 0.48 * k, 0.84]
    figure = new_figure(figsize=(sum(widths) + 0.8, sum(heights) + 1.2))
    grid = figure.add_gridspec(3, 3, width_ratios=widths, height_ratios=heights)

    is_classifier = model.task == "classification"
    top = figure.add_subplot(grid[0, 2])
    _draw_predictions(top, before, after, names, is_classifier)
    if is_image(example):
        picture = figure.add_subplot(grid[0, 0])
        draw_image(picture, example, display_range(example))
        picture.set_title("example", fontsize=9)
    bars = figure.add_subplot(grid[1, 1])
    _draw_weights(bars, found, names, is_classifier)
    each = figure.add_subplot(grid[1, 2])
    change = after - before
    _draw_changes(each, found.output_changes, f"change of each {_unit(is_classifier)}")
    each.set_yticks([])
    others = change - found.output_changes.sum(axis=0)
    whole = figure.add_subplot(grid[2, 2])
    _draw_changes(whole, np.stack([others, change]))
    rest = model.num_neighbors - k
    weight = max(1 - float(found.weights.sum()), 0.0)
    whole.set_yticks([])
    rows = figure.add_subplot(grid[2, 1], sharey=whole)
    rows.set_axis_off()
    for row, text in enumerate((f"{rest} others, weight {weight:.2f}", "sum of all")):
        rows.text(1, row, text, ha="right", va="center", fontsize=8)
    whole.set_xticks(range(len(names)), names, fontsize=8)
    if images is not None:
        frame = figure.add_subplot(grid[1, 0])
        _draw_nearest_images(frame, model, np.asarray(images), found.indices)
    return figure


def _unit(is_classifier: bool) -> str:
    return "logit" if is_classifier else "output"


def _draw_predictions(
    axis: Axes,
    before: np.ndarray,
    after: np.ndarray,
    names: list[str],
    is_classifier: bool,
) -> None:
    if is_classifier:
        before, after = _softmax(before), _softmax(after)
        axis.set_ylim(0, 1)
    places = np.arange(len(names))
    axis.bar(places - 0.2, before, 0.38, color=GREY, label="before adaptation")
    axis.bar(places + 0.2, after, 0.38, color=BLUE, label="after")
    axis.set_xticks(places, names, fontsize=8)
    axis.set_xlim(-0.5, len(names) - 0.5)
    axis.set_ylabel("probability" if is_classifier else "output", fontsize=9)
    axis.tick_params(axis="y", labelsize=8)
    axis.legend(fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))


def _draw_weights(
    axis: Axes, found: Neighbors, names: list[str], is_classifier: bool
) -> None:
    places = np.arange(len(found.indices))
    axis.barh(places, found.weights, color=ORANGE, height=0.6)
    labels = [f"entry {index}" for index in found.indices]
    if is_classifier:
        labels = [
            f"{label}: {names[value.argmax()]}"
            for label, value in zip(labels, found.values, strict=True)
        ]
    axis.set_yticks(places, labels, fontsize=8)
    axis.set_ylim(len(places) - 0.5, -0.5)
    axis.set_title("attention weight", fontsize=9)
    axis.tick_params(axis="x", labelsize=8)
    axis.locator_params(axis="x", nbins=3)


def _draw_changes(axis: Axes, changes: np.ndarray, title: str = "") -> None:
    """A row of colours, with numbers where there is room: blue up, red down."""
    largest = max(float(np.abs(changes).max()), 1e-12)
    axis.imshow(changes, cmap="RdBu", vmin=-largest, vmax=largest, aspect="auto")
    axis.set_title(title, fontsize=9)
    axis.set_xticks([])
    if changes.shape[1] > _MOST_NUMBERED_OUTPUTS:
        return
    for (row, column), value in np.ndenumerate(changes):
        dark = abs(value) > 0.6 * largest
        axis.text(
            column,
            row,
            f"{value:+.2f}",
            ha="center",
            va="center",
            fontsize=7.5,
            color="white" if dark else "black",
        )


def _draw_nearest_images(
    frame: Axes, model: MetaNeighborhoodModel, images: np.ndarray, indices: np.ndarray
) -> None:
    frame.set_axis_off()
    frame.set_title("nearest image", fontsize=9)
    nearest = attention_of(model, images)[:, indices].argmax(axis=0)
    height = 1 / len(nearest)
    values = display_range(images)
    for row, index in enumerate(nearest):
        inset = frame.inset_axes((0, 1 - (row + 0.95) * height, 1, 0.9 * height))
        draw_image(inset, images[index], values)


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()
