"""A picture of the images that a model finds most similar to others."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from nsl_keras import validation
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.training import data
from nsl_keras.visualize import figures, reading


def plot_subcategories(
    model: keras.Model,
    images: Any,
    labels: Any,
    queries: Any,
    query_labels: Any,
    nearest: int = 5,
    rows: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
) -> figures.Figure:
    """Draws queries with the nearest images, and compares their fine labels.

    The labels are finer than the classes that the model was trained on. An image is
    described by its attention to all dictionary entries, or, for a model without a
    dictionary, by the model's output; descriptions are compared by their cosine. The title
    gives the share of queries whose label the nearest images vote for (the nearest decides
    ties). This is the paper's "induction accuracy"; the paper states neither its number of
    neighbours nor its metric.

    Args:
        Same as `plot_learned_neighbors`, plus:
        model: A built `MetaNeighborhoodModel`, or for comparison any Keras model from
            images to features of shape `(batch, features)`.
        labels: Fine labels of `images`: class numbers of shape `(n,)`; `None` if a data set
            has them.
        queries: Images whose neighbours are drawn.
        query_labels: Their fine labels.
        rows: Numbers of the queries to draw. By default the first of each label, at most
            eight. The title counts all queries.

    Returns:
        A matplotlib figure with one row for each query: the query, then the images, the
        nearest first. A solid blue frame marks the query's label, a dashed orange one
        another.

    Raises:
        ValueError: If `nearest` exceeds the number of images, or labels do not fit.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.backbones.convnet4((8, 8, 1))
    >>> images = np.random.default_rng(0).random((20, 8, 8, 1)).astype("float32")
    >>> figure = nsl_keras.visualize.plot_subcategories(
    ...     model, images, np.arange(20) % 4, images[:6], np.arange(6) % 4)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Figure 6 and Appendix A.9.
    """
    inputs, labels = data.gather(images, labels)
    query_inputs, query_labels = data.gather(queries, query_labels)
    images = reading.require_images(inputs, "images")
    queries = reading.require_images(query_inputs, "queries")
    nearest = validation.positive_integer(nearest, "nearest", len(images))
    if class_names is None:
        numbers = [np.asarray(each) for each in (labels, query_labels)]
        largest = [each.max() for each in numbers if each.dtype.kind in "iuf"]
        class_names = list(map(str, range(1 + int(max(largest, default=0)))))
    names = [textwrap.fill(str(name), 14) for name in class_names]
    labels = reading.class_numbers(labels, images, len(names), "labels")
    query_labels = reading.class_numbers(query_labels, queries, len(names), "query_labels")
    first = np.sort(np.unique(query_labels, return_index=True)[1])[:8].tolist()
    drawn = reading.places(first if rows is None else rows, len(queries), "rows")
    cosines = _descriptions(model, query_inputs) @ _descriptions(model, inputs).T
    found = np.argsort(-cosines, axis=1, kind="stable")[:, :nearest]
    accuracy = np.mean(_vote(labels[found]) == query_labels)

    values = figures.display_range(images, queries)
    captions = np.asarray(names)[labels[found[drawn]]]
    figure, panels, others = figures.grid_of_images(images, found[drawn], captions, values)
    for row, query, axes in zip(drawn, panels, others, strict=True):
        figures.draw_image(query, queries[row], values)
        query.set_xlabel(names[query_labels[row]], fontsize=8, labelpad=2, weight="bold")
        for axis, index in zip(axes, found[row], strict=True):
            is_same = labels[index] == query_labels[row]
            for spine in axis.spines.values():
                spine.set(
                    color=figures.BLUE if is_same else figures.ORANGE,
                    linewidth=2.5,
                    linestyle="-" if is_same else (0, (2, 1.5)),
                )
    panels[0].set_title("query", fontsize=9)
    others[0, 0].set_title("nearest", fontsize=9)
    kind = "features"
    if isinstance(model, MetaNeighborhoodModel):
        kind = f"attention to {model.num_neighbors} entries"
    figure.suptitle(
        f"By {kind}: {100 * accuracy:.1f} % of {len(queries)} queries\n"
        f"have the label that their {nearest} nearest images vote for",
        fontsize=10,
    )
    return figure


def _descriptions(model: keras.Model, images: Any) -> np.ndarray:
    """Returns unit vectors that describe images, of shape `(n, length)`."""
    if isinstance(model, MetaNeighborhoodModel):
        found = reading.attention_of(model, images)
    else:
        found = model.predict(images, verbose=0)
    return keras.utils.normalize(found)


def _vote(labels: np.ndarray) -> np.ndarray:
    """Returns the most frequent label of each row; of several, the first in the row."""
    votes = (labels[:, :, None] == labels[:, None, :]).sum(axis=2)
    return labels[np.arange(len(labels)), votes.argmax(axis=1)]
