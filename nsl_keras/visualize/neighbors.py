"""Pictures of neighbours: entries, one prediction taken apart, and images found by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.neighborhoods.dictionary import require_same_length
from nsl_keras.neighborhoods.explain import (
    Neighbors,
    attention_of,
    class_numbers,
    in_batches,
    names_of,
    require_classifier,
)
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.visualize.figures import (
    BLUE,
    GREY,
    ORANGE,
    Axes,
    Figure,
    display_range,
    draw_image,
    is_image,
    new_figure,
)

#: More columns than these leave no room for numbers.
_MOST_NUMBERED_OUTPUTS = 12


def plot_learned_neighbors(
    model: MetaNeighborhoodModel,
    images: Any,
    entries: Sequence[int] | None = None,
    nearest: int = 6,
    class_names: Sequence[str] | None = None,
) -> Figure:
    """Draws dictionary entries: their class probabilities, and the images nearest them.

    Nearness is the model's own metric between an entry's key and the images' features.

    Args:
        model: A built `MetaNeighborhoodModel`.
        images: Array of images, `(n, height, width, channels)`, as the model gets them.
            In [0, 1] or [0, 255] they are drawn as they are, others (standardized ones)
            from their lowest to their highest value.
        entries: Entry numbers to draw; `None` takes, for each class in turn, the entry
            that the images look at most.
        nearest: int, the number of images drawn for each entry.
        class_names: Names of the classes; `None` numbers them.

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
    >>> len(nsl_keras.visualize.plot_learned_neighbors(model, images, [0, 5]).axes)
    14

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Appendix A.8, Figures 9 and 10.
    """
    require_classifier(model)
    images = np.asarray(images)
    nearest = validation.positive_integer(nearest, "nearest")
    if nearest > len(images):
        raise ValueError(
            f"`nearest` must be at most the number of images, {len(images)}. "
            f"Received: nearest={nearest}"
        )
    attention = attention_of(model, images)
    values = ops.convert_to_numpy(model.dictionary.values)
    size, classes = values.shape
    if entries is None:
        usage = attention.mean(axis=0)
        kinds = values.argmax(axis=1)
        entries = [
            int(np.flatnonzero(kinds == kind)[usage[kinds == kind].argmax()])
            for kind in range(classes)
            if (kinds == kind).any()
        ]
    if any(not 0 <= entry < size for entry in entries):
        raise ValueError(
            f"`entries` must be dictionary entries 0 to {size - 1}. "
            f"Received: entries={list(entries)}"
        )
    names = names_of(classes, class_names)
    figure = new_figure(figsize=(2.6 + 0.9 * nearest, 0.95 * len(entries)))
    rows = figure.subplots(
        len(entries),
        nearest + 1,
        squeeze=False,
        gridspec_kw={"width_ratios": [2.4] + [1] * nearest},
    )
    shown = display_range(images)
    for entry, axes in zip(entries, rows, strict=True):
        top = int(values[entry].argmax())
        colors = [
            "tab:blue" if kind == top else "lightsteelblue" for kind in range(classes)
        ]
        axes[0].bar(range(classes), values[entry], color=colors)
        axes[0].set_ylim(0, 1)
        axes[0].set_yticks([])
        axes[0].set_xticks([top], [names[top]], fontsize=8)
        axes[0].set_ylabel(f"entry {entry}", fontsize=7)
        for axis, index in zip(
            axes[1:], np.argsort(-attention[:, entry])[:nearest], strict=True
        ):
            draw_image(axis, images[index], shown)
            axis.set_axis_off()
    return figure


def plot_adaptation(
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
    >>> figure = nsl_keras.visualize.plot_adaptation(model, x[0], k=4)
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


def plot_subcategories(
    model: keras.Model,
    images: Any,
    labels: Any,
    queries: Any,
    query_labels: Any,
    nearest: int = 5,
    rows: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
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
        images: Array of images to choose from, `(n, height, width, channels)`, as the
            model gets them. In [0, 1] or [0, 255] they are drawn as they are, others
            (standardized ones) from their lowest to their highest value.
        labels: Their fine labels: class numbers, of shape `(n,)`.
        queries: Array of images like these.
        query_labels: Their fine labels.
        nearest: int, the number of images found for each query.
        rows: Numbers of the queries to draw; `None` takes the first of each label, eight
            at most. All count for the title.
        class_names: Names of the fine labels; `None` numbers them.

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
    images, queries = np.asarray(images), np.asarray(queries)
    nearest = validation.positive_integer(nearest, "nearest")
    if nearest > len(images):
        raise ValueError(
            f"`nearest` must be at most the number of images, {len(images)}. "
            f"Received: nearest={nearest}"
        )
    count = 1 + int(max(np.max(labels), np.max(query_labels)))
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
    found = _nearest(_descriptions(model, queries), _descriptions(model, images), nearest)
    accuracy = np.mean(_vote(labels[found]) == query_labels)

    names = names_of(count, class_names)
    figure = new_figure(figsize=(0.95 * (nearest + 1.4), 1.12 * len(rows) + 0.6))
    grid = figure.subplots(len(rows), nearest + 1, squeeze=False)
    shown = display_range(images, queries)
    for row, axes in zip(rows, grid, strict=True):
        draw_image(axes[0], queries[row], shown)
        axes[0].set_ylabel(names[query_labels[row]], fontsize=9, weight="bold")
        for axis, index in zip(axes[1:], found[row], strict=True):
            draw_image(axis, images[index], shown)
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


def _descriptions(model: keras.Model, images: np.ndarray) -> np.ndarray:
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
