"""A picture of dictionary entries: their classes, and the images that attend to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from experiments.common.pictures import attention_of
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.training import data
from nsl_keras.visualize import figures

_LIGHT_BLUE = "#B5D4E9"

#: At most this many entries are drawn by default.
_MOST_ROWS = 12

#: An entry is undecided if its most probable class is less probable than this.
_UNDECIDED = 0.5


def plot_entries(
    model: MetaNeighborhoodModel,
    images: Any,
    entries: Sequence[int] | None = None,
    nearest: int = 6,
    class_names: Sequence[str] | None = None,
) -> figures.Figure:
    """Appendix A.8, Figures 9 and 10: entries, and the images with the largest attention.

    By default, for each of the 12 most predicted classes, the entry with the largest mean
    attention of its images. An entry is undecided if its most probable class has less than
    50 %.
    """
    inputs, _ = data.gather(images)
    pictures = figures.require_images(model, inputs, "images")
    values = ops.convert_to_numpy(model.dictionary.values)
    names = figures.names_of(values.shape[1], class_names)
    attention = attention_of(model, inputs)
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
    colors = [_LIGHT_BLUE] * len(value)
    colors[top] = color
    axis.bar(range(len(value)), value, color=colors)
    axis.set_ylim(0, 1)
    axis.set_yticks([])
    axis.set_xticks([])
    axis.set_ylabel(f"entry\n{entry}", fontsize=8, rotation=0, ha="right", va="center")
    text = f"{names[top]}, {100 * value[top]:.0f} %" + ", undecided" * is_undecided
    axis.set_xlabel(text, fontsize=8, labelpad=2, color=color)
