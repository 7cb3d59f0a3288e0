"""Pictures of dictionary entries: what they stand for, and what looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from nsl_keras import data, validation
from nsl_keras.neighborhoods.explain import (
    attention_of,
    in_batches,
    names_of,
    require_classifier,
)
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.visualize.figures import (
    BLUE,
    LIGHT_BLUE,
    ORANGE,
    Axes,
    Figure,
    display_range,
    draw_image,
    new_figure,
    percentage,
    require_images,
)

#: Rows that are drawn where nobody says which.
_MOST_ROWS = 12

#: The probability of its most probable class below which an entry is undecided.
UNDECIDED = 0.5


def plot_learned_neighbors(
    model: MetaNeighborhoodModel,
    images: Any,
    entries: Sequence[int] | None = None,
    nearest: int = 6,
    class_names: Sequence[str] | None = None,
    invert: bool = False,
) -> Figure:
    """Draws dictionary entries: their class probabilities, and the images nearest them.

    Nearness is the attention that an image gives to an entry; its weight stands under the
    image. An entry whose most probable class has less than 50 % is marked as undecided.

    Args:
        model: A built `MetaNeighborhoodModel`.
        images: Images, `(n, height, width, channels)`, as the model gets them, best those
            of a test: an array, several inputs as the model takes them (the first that are
            images are drawn), or a data set as for `predict`, which must end. In [0, 1] or
            [0, 255] they are drawn as they are, others (standardized ones) from their
            lowest value, or 0, to their highest.
        entries: Entry numbers to draw; `None` takes, for each class that the model predicts
            of the images (the 12 most frequent), the entry that its images look at most.
        nearest: int, the number of images drawn for each entry.
        class_names: Names of the classes; `None` numbers them.
        invert: bool, whether grey images are drawn as negatives.

    Returns:
        A matplotlib figure, one row an entry.

    Raises:
        ValueError: If `nearest` exceeds the number of images, an entry is not in the
            dictionary, or the model is no classifier.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     nsl_keras.backbones.convnet4((8, 8, 1)),
    ...     nsl_keras.layers.CosineDense(3), dictionary=12)
    >>> images = np.random.default_rng(0).random((20, 8, 8, 1)).astype("float32")
    >>> model.build(images.shape)
    >>> figure = nsl_keras.visualize.plot_learned_neighbors(model, images, [0, 5])
    >>> len(figure.axes)
    14

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Appendix A.8, Figures 9 and 10.
    """
    require_classifier(model)
    inputs, _ = data.gathered(images)
    pictures = require_images(inputs, "images")
    nearest = validation.positive_integer(nearest, "nearest")
    if nearest > len(pictures):
        raise ValueError(
            f"`nearest` must be at most the number of images, {len(pictures)}. "
            f"Received: nearest={nearest}"
        )
    attention = attention_of(model, inputs)
    values = ops.convert_to_numpy(model.dictionary.values)
    size, classes = values.shape
    if entries is None:
        logits = in_batches(lambda batch: model(batch, training=False), inputs)
        entries = _entries_looked_at(attention, logits.argmax(axis=1))
    if any(not 0 <= entry < size for entry in entries):
        raise ValueError(
            f"`entries` must be dictionary entries 0 to {size - 1}. "
            f"Received: entries={list(entries)}"
        )
    names = names_of(classes, class_names)
    # A few images get more room than they need: their heading is as long as it is.
    columns = max(nearest, 4.5)
    figure = new_figure(figsize=(2.8 + 0.8 * columns, 0.96 * len(entries) + 0.5))
    rows = figure.subplots(
        len(entries),
        nearest + 1,
        squeeze=False,
        gridspec_kw={"width_ratios": [2.6] + [columns / nearest] * nearest},
    )
    shown = display_range(pictures)
    for entry, axes in zip(entries, rows, strict=True):
        _draw_value(axes[0], entry, values[entry], names)
        for axis, index in zip(
            axes[1:], np.argsort(-attention[:, entry])[:nearest], strict=True
        ):
            draw_image(axis, pictures[index], shown, invert)
            axis.set_anchor("W")
            axis.spines[:].set_visible(False)
            axis.set_xlabel(f"{attention[index, entry]:.2g}", fontsize=7, labelpad=1)
    rows[0, 0].set_title("class probabilities", fontsize=9)
    # No title of the axis, whose column would become as wide.
    heading = rows[0, 1].annotate(
        "images that look at it most, and their attention",
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 5),
        textcoords="offset points",
        fontsize=9,
    )
    heading.set_in_layout(False)
    return figure


def _entries_looked_at(attention: np.ndarray, predicted: np.ndarray) -> list[int]:
    """The entry that the images of each predicted class look at most, none twice."""
    kinds, counts = np.unique(predicted, return_counts=True)
    most_frequent = np.sort(kinds[np.argsort(-counts, kind="stable")[:_MOST_ROWS]])
    chosen: list[int] = []
    for kind in most_frequent:
        usage = attention[predicted == kind].mean(axis=0)
        usage[chosen] = -1
        if usage.max() >= 0:
            chosen.append(int(usage.argmax()))
    return chosen


def _draw_value(axis: Axes, entry: int, value: np.ndarray, names: Sequence[str]) -> None:
    """Bars of an entry's class probabilities, the largest with its name and number."""
    top = int(value.argmax())
    is_undecided = value[top] < UNDECIDED
    color = ORANGE if is_undecided else BLUE
    places = range(len(value))
    axis.bar(places, value, color=[color if kind == top else LIGHT_BLUE for kind in places])
    axis.set_ylim(0, 1)
    axis.set_xlim(-0.7, len(value) - 0.3)
    axis.set_yticks([])
    axis.set_xticks([top], [names[top]], fontsize=8)
    axis.tick_params(axis="x", length=2, pad=1)
    axis.set_ylabel(f"entry\n{entry}", fontsize=8, rotation=0, ha="right", va="center")
    text = percentage(value[top]) + (", undecided" if is_undecided else "")
    is_left = top < len(value) / 2
    axis.text(
        # On the side without the bar.
        0.97 if is_left else 0.03,
        0.93,
        text,
        transform=axis.transAxes,
        ha="right" if is_left else "left",
        va="top",
        fontsize=8,
        color=color,
        weight="bold",
    )
