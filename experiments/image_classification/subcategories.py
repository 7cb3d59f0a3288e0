"""Nearest training images, by fine labels that the model has not seen (Appendix A.9)."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from experiments.common.data import ImageData, Split
from experiments.common.pictures import (
    BLUE,
    ORANGE,
    attention_of,
    draw_image,
    grid_of_images,
)
from nsl_keras import MetaNeighborhoodModel

#: The paper names neither the number of neighbors nor the metric; here it is the cosine.
NEAREST = 5


def described(model: keras.Model, images: np.ndarray) -> np.ndarray:
    """Images by their attention over the dictionary, or by a plain model's features."""
    if isinstance(model, MetaNeighborhoodModel):
        return attention_of(model, images)
    return model.layers[0].predict(images, verbose=0)


def nearest_images(model: keras.Model, train: Split, nearest: int = NEAREST) -> Any:
    """The vote of the nearest training images, to be asked about `described` ones."""
    from sklearn.neighbors import KNeighborsClassifier

    classifier = KNeighborsClassifier(nearest, metric="cosine")
    return classifier.fit(described(model, train.images), train.labels)


def induction_accuracy(model: keras.Model, data: ImageData) -> float:
    """How well nearest training images find the classes of data, coarse or fine."""
    found = described(model, data.test.images)
    return float(nearest_images(model, data.train).score(found, data.test.labels))


def plot_subcategories(
    model: keras.Model,
    train: Split,
    queries: Split,
    names: Sequence[str],
    nearest: int = NEAREST,
) -> Any:
    """Figure 6: the first query of each label with its nearest images, and their labels.

    A solid blue frame marks the query's label, a dashed orange one another. The title
    counts all queries.
    """
    names = [textwrap.fill(str(name), 14) for name in names]
    vote, found = nearest_images(model, train, nearest), described(model, queries.images)
    drawn = np.sort(np.unique(queries.labels, return_index=True)[1])[:8]
    neighbors = vote.kneighbors(found[drawn], return_distance=False)

    captions = np.asarray(names)[train.labels[neighbors]]
    figure, panels, others = grid_of_images(train.images, neighbors, captions)
    for row, query, axes, beside in zip(drawn, panels, others, neighbors, strict=True):
        label = queries.labels[row]
        draw_image(query, queries.images[row])
        query.set_xlabel(names[label], fontsize=8, labelpad=2, weight="bold")
        for axis, index in zip(axes, beside, strict=True):
            look = {"color": BLUE, "linestyle": "-"}
            if train.labels[index] != label:
                look = {"color": ORANGE, "linestyle": (0, (2, 1.5))}
            for spine in axis.spines.values():
                spine.set(linewidth=2.5, **look)
    panels[0].set_title("query", fontsize=9)
    others[0, 0].set_title("nearest", fontsize=9)
    kind = "features"
    if isinstance(model, MetaNeighborhoodModel):
        kind = f"attention to {model.num_neighbors} entries"
    figure.suptitle(
        f"By {kind}: {100 * vote.score(found, queries.labels):.1f} % of {len(found)} "
        f"queries\nhave the label that their {nearest} nearest images vote for",
        fontsize=10,
    )
    return figure
