"""Pictures of images found by what a model takes them for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from nsl_keras import data, validation
from nsl_keras.neighborhoods.dictionary import require_same_length
from nsl_keras.neighborhoods.explain import (
    attention_of,
    class_numbers,
    in_batches,
    names_of,
)
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.visualize.figures import (
    BLUE,
    ORANGE,
    Figure,
    display_range,
    draw_image,
    new_figure,
    require_images,
)

#: Inches that the title needs.
_LEAST_WIDTH = 4.3


def plot_subcategories(
    model: keras.Model,
    images: Any,
    labels: Any,
    queries: Any,
    query_labels: Any,
    nearest: int = 5,
    rows: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    invert: bool = False,
) -> Figure:
    """Draws queries with the images most like them, judged by labels unknown to the model.

    The labels are finer than the classes that the model was trained on. A
    `MetaNeighborhoodModel` describes an image by its attention over all dictionary
    entries, any other model by its output; descriptions are compared by their cosine. The
    title says how many of all queries get their own label by the vote of their nearest
    images, the nearest deciding ties: with `nearest` neighbours, the paper's "induction
    accuracy" of a KNN classifier (for which it tells neither `nearest` nor metric).

    Args:
        model: A built `MetaNeighborhoodModel`, or for comparison any Keras model from
            images to features of shape `(batch, features)`.
        images: Images to choose from, `(n, height, width, channels)`, as the model gets
            them: an array, several inputs as the model takes them, or a data set as for
            `predict`, which must end. In [0, 1] or [0, 255] they are drawn as they are,
            others (standardized ones) from their lowest value, or 0, to their highest.
        labels: Their fine labels: class numbers, of shape `(n,)`; `None` where a data set
            of images has them.
        queries: Images like these.
        query_labels: Their fine labels, as above.
        nearest: int, the number of images found for each query.
        rows: Numbers of the queries to draw; `None` takes the first of each label, eight
            at most. All count for the title.
        class_names: Names of the fine labels; `None` numbers them.
        invert: bool, whether grey images are drawn as negatives.

    Returns:
        A matplotlib figure, one row a query: the query, then the images found, the
        nearest first, in a solid blue frame where the label is the query's, in a dashed
        orange one elsewhere.

    Raises:
        ValueError: If `nearest` exceeds the number of images, a row is no query, or labels
            do not fit.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     nsl_keras.backbones.convnet4((8, 8, 1)),
    ...     nsl_keras.layers.CosineDense(2), dictionary=12)
    >>> images = np.random.default_rng(0).random((20, 8, 8, 1)).astype("float32")
    >>> model.build(images.shape)
    >>> figure = nsl_keras.visualize.plot_subcategories(
    ...     model, images, np.arange(20) % 4, images[:6], np.arange(6) % 4)
    >>> len(figure.axes)
    24

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Figure 6 and Appendix A.9.
    """
    inputs, labels = data.gathered(images, labels)
    query_inputs, query_labels = data.gathered(queries, query_labels)
    images, queries = (
        require_images(inputs, "images"),
        require_images(query_inputs, "queries"),
    )
    data.require_targets(labels, "labels")
    data.require_targets(query_labels, "query_labels")
    nearest = validation.positive_integer(nearest, "nearest")
    if nearest > len(images):
        raise ValueError(
            f"`nearest` must be at most the number of images, {len(images)}. "
            f"Received: nearest={nearest}"
        )
    count = 0 if class_names is None else len(class_names)
    for given in (np.asarray(labels), np.asarray(query_labels)):
        if given.dtype.kind in "biuf":  # Others are refused below.
            count = max(count, 1 + int(given.max()))
    labels = class_numbers(labels, count, "labels")
    query_labels = class_numbers(query_labels, count, "query_labels")
    require_same_length(images, labels, "images", "labels")
    require_same_length(queries, query_labels, "queries", "query_labels")
    if rows is None:
        rows = np.sort(np.unique(query_labels, return_index=True)[1])[:8].tolist()
    if any(not 0 <= row < len(queries) for row in rows):
        raise ValueError(
            f"`rows` must be numbers of queries, 0 to {len(queries) - 1}. "
            f"Received: rows={list(rows)}"
        )
    found = _nearest(
        _descriptions(model, query_inputs), _descriptions(model, inputs), nearest
    )
    accuracy = np.mean(_vote(labels[found]) == query_labels)

    names = names_of(count, class_names)
    longest = max(map(len, names))
    column = max(0.95, 0.066 * longest + 0.1)
    is_upright = 0.085 * longest <= 1
    width = column * (nearest + 1) + (0.4 if is_upright else 0.085 * longest + 0.2)
    figure = new_figure(figsize=(max(width, _LEAST_WIDTH), 1.12 * len(rows) + 0.6))
    grid = figure.subplots(len(rows), nearest + 1, squeeze=False)
    shown = display_range(images, queries)
    for row, axes in zip(rows, grid, strict=True):
        draw_image(axes[0], queries[row], shown, invert)
        axes[0].set_ylabel(
            names[query_labels[row]],
            fontsize=9,
            weight="bold",
            **({} if is_upright else {"rotation": 0, "ha": "right", "va": "center"}),
        )
        for axis, index in zip(axes[1:], found[row], strict=True):
            draw_image(axis, images[index], shown, invert)
            right = labels[index] == query_labels[row]
            for spine in axis.spines.values():
                spine.set(
                    color=BLUE if right else ORANGE,
                    linewidth=2.5,
                    linestyle="-" if right else (0, (2, 1.5)),
                )
            axis.set_xlabel(names[labels[index]], fontsize=8, labelpad=2)
    grid[0, 0].set_title("query", fontsize=9)
    grid[0, 1].set_title("nearest", fontsize=9)
    figure.suptitle(
        f"By {_kind_of_description(model)}: {100 * accuracy:.1f} % of {len(queries)} "
        f"queries\nhave the label that their {nearest} nearest images vote for",
        fontsize=10,
    )
    return figure


def _kind_of_description(model: keras.Model) -> str:
    if isinstance(model, MetaNeighborhoodModel):
        return f"attention over {model.num_neighbors} entries"
    return "features"


def _descriptions(model: keras.Model, images: Any) -> np.ndarray:
    """Unit vectors that describe images, of shape `(n, length)`."""
    if isinstance(model, MetaNeighborhoodModel):
        found = attention_of(model, images)
    else:
        found = in_batches(lambda batch: model(batch, training=False), images)
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)


def _nearest(queries: np.ndarray, images: np.ndarray, count: int) -> np.ndarray:
    """Numbers of the images with the largest cosines, of shape `(queries, count)`."""
    parts = [
        np.argsort(-(queries[start : start + 256] @ images.T), axis=1, kind="stable")
        for start in range(0, len(queries), 256)
    ]
    return np.concatenate([part[:, :count] for part in parts])


def _vote(labels: np.ndarray) -> np.ndarray:
    """The most frequent label of each row; of several, the one that comes first."""
    votes = (labels[:, :, None] == labels[:, None, :]).sum(axis=2)
    return labels[np.arange(len(labels)), votes.argmax(axis=1)]
