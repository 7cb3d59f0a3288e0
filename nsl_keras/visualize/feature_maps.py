"""A map of the feature space: dictionary entries among examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.neighborhoods.dictionary import require_same_length
from nsl_keras.neighborhoods.explain import (
    class_numbers,
    features_of,
    names_of,
    require_classifier,
)
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.visualize.figures import colors_of, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("pca", "tsne")


def feature_map(
    model: MetaNeighborhoodModel,
    x: Any,
    y: Any,
    method: str = "pca",
    class_names: Sequence[str] | None = None,
    seed: int = 0,
) -> Figure:
    """Draws the dictionary's keys among the features of examples, in two dimensions.

    Colours are classes, an entry's being the one its value holds most probable. Under the
    cosine metric all vectors are brought to unit length first: length plays no part.

    Args:
        model: A built `MetaNeighborhoodModel`, a classifier.
        x: Array of inputs, training examples in the paper.
        y: Their labels, as for `fit`.
        method: `"pca"`: the plane of the examples' two largest principal components;
            `"tsne"`: t-SNE of examples and entries together (needs scikit-learn).
        class_names: Names of the classes; `None` numbers them.
        seed: int, the seed of t-SNE.

    Returns:
        A matplotlib figure with one panel.

    Raises:
        ValueError: If `method` is another, if there are fewer than two examples or
            features, for labels that do not fit, or if the model is no classifier.
        ImportError: For t-SNE without scikit-learn.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=12)
    >>> x = np.random.default_rng(0).normal(size=(30, 6)).astype("float32")
    >>> model.build(x.shape)
    >>> figure = nsl_keras.visualize.feature_map(model, x, np.arange(30) % 3)
    >>> [axis.get_title() for axis in figure.axes]
    ['30 examples and 12 learned neighbours']

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 4.2, Figure 5 (t-SNE).
    """
    require_classifier(model)
    method = validation.one_of(method, METHODS, "method")
    dictionary = model.dictionary
    values = ops.convert_to_numpy(dictionary.values)
    classes = values.shape[1]
    labels = class_numbers(y, classes)
    require_same_length(x, labels, "x")
    examples, keys = features_of(model, x), ops.convert_to_numpy(dictionary.keys.value)
    if min(examples.shape) < 2:
        raise ValueError(
            "`x` must have at least two examples of at least two features for a map. "
            f"Received: features of shape {examples.shape}"
        )
    if dictionary.metric == "cosine":
        examples, keys = _unit(examples), _unit(keys)
    places = _principal_plane if method == "pca" else _neighbor_embedding
    places_of_examples, places_of_keys, axis_labels = places(examples, keys, seed)

    names, colors = names_of(classes, class_names), np.asarray(colors_of(classes))
    figure = new_figure(figsize=(7.0, 5.6))
    axis = figure.subplots()
    across, up = places_of_examples.T
    axis.scatter(across, up, c=colors[labels], s=14, alpha=0.45, lw=0, marker="o")
    across, up = places_of_keys.T
    axis.scatter(across, up, c=colors[values.argmax(axis=1)], s=42, lw=1.3, marker="+")
    for kind in np.unique(labels):
        axis.annotate(
            names[kind],
            np.median(places_of_examples[labels == kind], axis=0),
            ha="center",
            va="center",
            fontsize=11,
            weight="bold",
            bbox={"boxstyle": "round,pad=0.2", "fc": "white", "ec": colors[kind]},
        )
    # Colours are named on the map: the legend is of shapes alone.
    axis.scatter([], [], c="black", s=20, marker="o", label="example")
    axis.scatter([], [], c="black", s=42, marker="+", label="learned neighbour")
    axis.legend(loc="best", frameon=True, fontsize=9)
    axis.set_title(f"{len(labels)} examples and {len(keys)} learned neighbours")
    axis.set_xlabel(axis_labels[0])
    axis.set_ylabel(axis_labels[1])
    axis.set_xticks([])
    axis.set_yticks([])
    return figure


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _principal_plane(
    examples: np.ndarray, keys: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    center = examples.mean(axis=0)
    _, lengths, directions = np.linalg.svd(examples - center, full_matrices=False)
    shares = lengths**2 / max(float((lengths**2).sum()), 1e-12)
    labels = [
        f"{order} principal component ({100 * share:.0f} % of the variance)"
        for order, share in zip(("first", "second"), shares, strict=False)
    ]
    plane = directions[:2].T
    return (examples - center) @ plane, (keys - center) @ plane, labels


def _neighbor_embedding(
    examples: np.ndarray, keys: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    try:
        from sklearn.manifold import TSNE
    except ModuleNotFoundError as error:
        raise ImportError(
            '`method="tsne"` needs scikit-learn. Install it with '
            '`pip install scikit-learn`, or use method="pca".'
        ) from error
    together = np.concatenate([examples, keys])
    perplexity = min(30.0, (len(together) - 1) / 3)
    embedding = TSNE(perplexity=perplexity, init="pca", random_state=seed)
    places = embedding.fit_transform(together)
    return places[: len(examples)], places[len(examples) :], ["t-SNE 1", "t-SNE 2"]
