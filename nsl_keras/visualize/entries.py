"""A picture of dictionary entries: their classes, and the images that attend to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.training import data
from nsl_keras.visualize import figures

#: At most this many entries are drawn by default.
_MOST_ROWS = 12

#: An entry is undecided if its most probable class is less probable than this.
_UNDECIDED = 0.5


def plot_learned_neighbors(
    model: MetaNeighborhoodModel,
    images: Any,
    entries: Sequence[int] | None = None,
    nearest: int = 6,
    class_names: Sequence[str] | None = None,
) -> figures.Figure:
    """Draws dictionary entries: their class probabilities, and the nearest images.

    The nearest images are those with the largest attention to an entry, which is written
    below them. An entry is undecided if its most probable class has less than 50 %.

    Args:
        model: A built `MetaNeighborhoodModel`, a classifier.
        images: Images as the model takes them, `(n, height, width, channels)`, preferably
            test images: an array, several inputs (the first that are images are drawn), or
            a finite data set. Values in [0, 1] or [0, 255] are drawn unchanged, others are
            scaled from the lowest to the highest.
        entries: Numbers of the entries to draw. By default, for each of the 12 most
            predicted classes, the entry with the largest mean attention of its images.
        nearest: int, the number of images for each entry.
        class_names: Names of the classes; `None` numbers them.

    Returns:
        A matplotlib figure with one row for each entry.

    Raises:
        ValueError: If `nearest` exceeds the number of images, or the model is not a
            classifier.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     nsl_keras.backbones.convnet4((8, 8, 1)),
    ...     nsl_keras.layers.CosineDense(3), dictionary=12)
    >>> images = np.random.default_rng(0).random((20, 8, 8, 1)).astype("float32")
    >>> model.build(images.shape)
    >>> figure = nsl_keras.visualize.plot_learned_neighbors(model, images, [0, 5])

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Appendix A.8, Figures 9 and 10.
    """
    task = getattr(model, "task", None)
    if task != "classification":
        raise ValueError(
            "`model` must be a classifier, a MetaNeighborhoodModel. "
            f"Received: a {type(model).__name__} with task={task!r}"
        )
    inputs, _ = data.gather(images)
    pictures = figures.require_images(inputs, "images")
    nearest = validation.positive_integer(nearest, "nearest")
    values = ops.convert_to_numpy(model.dictionary.values)
    names = figures.names_of(values.shape[1], class_names)
    attention = figures.attention_of(model, inputs)
    if entries is None:
        predicted = model.predict(inputs, verbose=0).argmax(axis=1)
        entries = _entries_attended_to(attention, predicted)
    drawn = np.asarray(entries)
    found = np.argsort(-attention[:, drawn].T, axis=1)[:, :nearest]
    weights = np.take_along_axis(attention[:, drawn].T, found, axis=1)
    figure, panels, rows = figures.grid_of_images(
        pictures,
        found,
        np.vectorize("{:.2g}".format)(weights),
        figures.display_range(pictures),
        first_width=2.6,
    )
    for axis, entry in zip(panels, drawn, strict=True):
        _draw_value(axis, entry, values[entry], names)
    panels[0].set_title("class probabilities", fontsize=9)
    rows[0, 0].set_title("nearest images, with attention", fontsize=9, loc="left")
    return figure


def _entries_attended_to(attention: np.ndarray, predicted: np.ndarray) -> list[int]:
    """Returns a different entry for each predicted class."""
    kinds, counts = np.unique(predicted, return_counts=True)
    most = min(_MOST_ROWS, attention.shape[1])
    chosen: list[int] = []
    for kind in np.sort(kinds[np.argsort(-counts, kind="stable")[:most]]):
        usage = attention[predicted == kind].mean(axis=0)
        usage[chosen] = -1
        chosen.append(int(usage.argmax()))
    return chosen


def _draw_value(
    axis: figures.Axes, entry: int, value: np.ndarray, names: Sequence[str]
) -> None:
    """Draws an entry's class probabilities as bars, and names the most probable class."""
    top = int(value.argmax())
    is_undecided = bool(value[top] < _UNDECIDED)
    color = figures.ORANGE if is_undecided else figures.BLUE
    colors = [figures.LIGHT_BLUE] * len(value)
    colors[top] = color
    axis.bar(range(len(value)), value, color=colors)
    axis.set_ylim(0, 1)
    axis.set_yticks([])
    axis.set_xticks([])
    axis.set_ylabel(f"entry\n{entry}", fontsize=8, rotation=0, ha="right", va="center")
    text = f"{names[top]}, {100 * value[top]:.0f} %" + ", undecided" * is_undecided
    axis.set_xlabel(text, fontsize=8, labelpad=2, color=color)
