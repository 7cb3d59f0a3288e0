"""A picture of predictions beside the training images that the model compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nsl_keras import validation
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.training import data
from nsl_keras.visualize import figures


def plot_neighbors(
    model: MetaNeighborhoodModel,
    x: Any,
    examples: Any,
    labels: Any = None,
    k: int = 5,
    class_names: Sequence[str] | None = None,
) -> figures.Figure:
    """Draws predictions, each beside the training images that the model attends to most.

    Each dictionary entry stands for the example nearest to it. An example's share of the
    attention, written below it, is the sum over its entries.

    Args:
        model: A built `MetaNeighborhoodModel`.
        x: The images to explain, one row each, as the model takes them, `(n, height, width,
            channels)`: an array, several inputs (the first input of images is drawn), or a
            finite data set. Values in [0, 1] or [0, 255] are drawn unchanged, all others
            are scaled from the lowest to the highest.
        examples: Training images to choose neighbors from, in the form of `x`.
        labels: Class numbers or targets of the examples, to be written below them. `None`
            takes the labels that a data set yields, if any.
        k: int, the number of neighbors, at most the number of examples.
        class_names: Names of the classes; `None` numbers them.

    Raises:
        ValueError: If `x` or `examples` holds no images, `labels` do not fit, or `k` is out
            of range.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     nsl_keras.backbones.convnet4((8, 8, 1)),
    ...     nsl_keras.layers.CosineDense(3), dictionary=12)
    >>> images = np.random.default_rng(0).random((20, 8, 8, 1)).astype("float32")
    >>> model.build(images.shape)
    >>> figure = nsl_keras.visualize.plot_neighbors(model, images[:2], images)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Appendix A.8.
    """
    figures.require_neighbors(model)
    x, _ = data.gather(x)
    examples, labels = data.gather(examples, labels)
    queries = figures.require_images(model, x, "x")
    pictures = figures.require_images(model, examples, "examples")
    most = len(pictures)
    demand = f"at least 1, and at most the number of examples, {most}"
    validation.require(k in range(1, most + 1), "k", demand, k)
    found = model.neighbors(x, k=model.num_neighbors)
    attention = np.zeros((len(queries), len(pictures)))
    nearest = model.nearest_examples(examples)[found.indices]
    np.add.at(attention, (np.arange(len(queries))[:, None], nearest), found.weights)
    drawn = np.argsort(-attention, axis=1, kind="stable")[:, :k]
    shares = np.take_along_axis(attention, drawn, axis=1)
    is_classifier = model.task == "classification"
    outputs = found.after.shape[1]
    names = figures.names_of(outputs, class_names) if is_classifier else None
    captions = np.vectorize("{:.1%}".format)(shares).astype(object)
    if labels is not None:
        validation.one_per_example(labels, len(pictures))
        if is_classifier:
            validation.class_labels(labels, outputs, "labels")
        labels = np.reshape(labels, (len(pictures), -1))
        if is_classifier and labels.shape[1] == 1:
            labels = np.eye(outputs)[labels[:, 0].astype("int64")]
        captions = np.array(_texts(labels, names), object)[drawn] + ", " + captions
    shown = figures.display_range(queries, pictures)
    figure, panels, rows = figures.grid_of_images(pictures, drawn, captions, shown)
    before, after = _texts(found.before, names), _texts(found.after, names)
    for axis, query, old, new in zip(panels, queries, before, after, strict=True):
        figures.draw_image(axis, query, shown)
        axis.set_xlabel(new if old == new else f"{new}\nbefore: {old}", fontsize=8)
    panels[0].set_title("predicted", fontsize=9, loc="left")
    rows[0, 0].set_title("neighbors, with their attention", fontsize=9, loc="left")
    return figure


def _texts(outputs: np.ndarray, names: Sequence[str] | None) -> list[str]:
    """Returns each row's most probable class, or its numbers, as text."""
    if names is None:
        return [", ".join(f"{value:.3g}" for value in row) for row in outputs]
    return [names[index] for index in outputs.argmax(axis=1)]
