"""A picture of dictionary entries: their classes, and the images that attend to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from experiments.common.pictures import BLUE, ORANGE, attention_of, grid_of_images
from nsl_keras import MetaNeighborhoodModel

_LIGHT_BLUE = "#B5D4E9"
#: At most this many entries are drawn.
_MOST_ROWS = 12


def plot_entries(
    model: MetaNeighborhoodModel,
    images: np.ndarray,
    names: Sequence[str],
    nearest: int = 6,
) -> Any:
    """Appendix A.8, Figures 9 and 10: entries, and the images with the largest attention.

    For each of the most predicted classes, the entry with the largest mean attention of its
    images. An entry is undecided if its most probable class has less than 50 %.
    """
    values = ops.convert_to_numpy(model.dictionary.values)
    attention = attention_of(model, images)
    predicted = model.predict(images, verbose=0).argmax(axis=1)
    drawn = np.asarray(_entries_attended_to(attention, predicted))
    found = np.argsort(-attention[:, drawn].T, axis=1)[:, :nearest]
    weights = np.take_along_axis(attention[:, drawn].T, found, axis=1)
    captions = np.vectorize("{:.2g}".format)(weights)
    figure, panels, rows = grid_of_images(images, found, captions, first_width=2.6)
    for axis, entry in zip(panels, drawn, strict=True):
        _draw_value(axis, entry, values[entry], names)
    panels[0].set_title("class probabilities", fontsize=9)
    rows[0, 0].set_title("nearest images, with attention", fontsize=9, loc="left")
    return figure


def _entries_attended_to(attention: np.ndarray, predicted: np.ndarray) -> list[int]:
    """A different entry for each predicted class."""
    kinds, counts = np.unique(predicted, return_counts=True)
    most = min(_MOST_ROWS, attention.shape[1])
    chosen: list[int] = []
    for kind in np.sort(kinds[np.argsort(-counts, kind="stable")[:most]]):
        usage = attention[predicted == kind].mean(axis=0)
        usage[chosen] = -1
        chosen.append(int(usage.argmax()))
    return chosen


def _draw_value(axis: Any, entry: int, value: np.ndarray, names: Sequence[str]) -> None:
    """Draws an entry's class probabilities as bars, and names the most probable class."""
    top = int(value.argmax())
    is_undecided = bool(value[top] < 0.5)
    color = ORANGE if is_undecided else BLUE
    colors = [_LIGHT_BLUE] * len(value)
    colors[top] = color
    axis.bar(range(len(value)), value, color=colors)
    axis.set(ylim=(0, 1), xticks=[], yticks=[])
    axis.set_ylabel(f"entry\n{entry}", fontsize=8, rotation=0, ha="right", va="center")
    text = f"{names[top]}, {100 * value[top]:.0f} %" + ", undecided" * is_undecided
    axis.set_xlabel(text, fontsize=8, labelpad=2, color=color)
