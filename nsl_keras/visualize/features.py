"""Pictures of the feature space: entries among examples, and prototypes that turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import data, validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.neighborhoods.cosine import CosineDense, unit_norm
from nsl_keras.neighborhoods.dictionary import require_same_length
from nsl_keras.neighborhoods.explain import (
    class_numbers,
    features_of,
    in_batches,
    names_of,
    require_classifier,
)
from nsl_keras.neighborhoods.key_metrics import Cosine
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.visualize.entries import UNDECIDED
from nsl_keras.visualize.figures import (
    BLUE,
    GREY,
    ORANGE,
    Axes,
    Figure,
    colors_of,
    markers_of,
    new_figure,
)

METHODS = ("pca", "tsne")

#: The change of a cosine that may be rounding.
_LEAST_TURN = 1e-6


def plot_feature_map(
    model: MetaNeighborhoodModel,
    x: Any,
    y: Any = None,
    method: str = "pca",
    class_names: Sequence[str] | None = None,
    seed: int = 0,
) -> Figure:
    """Draws the dictionary's keys among the features of examples, in two dimensions.

    Colours and shapes are classes, an entry's being the one its value holds most probable;
    entries are large, and hollow where that class has less than 50 %. Under the cosine
    metric all vectors are brought to unit length first: length plays no part.

    Args:
        model: A built `MetaNeighborhoodModel`, a classifier.
        x: Inputs, training examples in the paper: an array, several as the model takes
            them, or a data set as for `predict`, which must end.
        y: Their labels, as for `fit`; `None` where a data set has them.
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
    >>> figure = nsl_keras.visualize.plot_feature_map(model, x, np.arange(30) % 3)
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
    x, y = data.gathered(x, y)
    labels = class_numbers(data.require_targets(y), classes)
    require_same_length(range(data.length_of(x)), labels, "x")
    # NumPy's linear algebra has no half precision.
    examples, keys = (
        ops.convert_to_numpy(at_least_float32(vectors))
        for vectors in (features_of(model, x), dictionary.keys.value)
    )
    if min(examples.shape) < 2:
        raise ValueError(
            "`x` must have at least two examples of at least two features for a map. "
            f"Received: features of shape {examples.shape}"
        )
    if isinstance(dictionary.metric, Cosine):
        examples, keys = _unit(examples), _unit(keys)
    places = _principal_plane if method == "pca" else _neighbor_embedding
    places_of_examples, places_of_keys, axis_labels = places(examples, keys, seed)

    figure = new_figure(figsize=(7.6, 5.6))
    axis = figure.subplots()
    _draw_classes(axis, places_of_examples, labels, places_of_keys, values)
    _add_legend(axis, names_of(classes, class_names))
    axis.set_title(f"{len(labels)} examples and {len(keys)} learned neighbours")
    axis.set_xlabel(axis_labels[0])
    axis.set_ylabel(axis_labels[1])
    axis.set_xticks([])
    axis.set_yticks([])
    return figure


def _draw_classes(
    axis: Axes,
    examples: np.ndarray,
    labels: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
) -> None:
    """Draws examples, then entries over them, in the colour and shape of their class."""
    colors, markers = colors_of(values.shape[1]), markers_of(values.shape[1])
    kinds, is_decided = values.argmax(axis=1), values.max(axis=1) >= UNDECIDED
    for kind, (color, marker) in enumerate(zip(colors, markers, strict=True)):
        places = examples[labels == kind]
        axis.scatter(*places.T, color=color, marker=marker, s=12, alpha=0.5, lw=0)
    for kind, (color, marker) in enumerate(zip(colors, markers, strict=True)):
        for chosen, face, edge in (
            ((kinds == kind) & ~is_decided, "white", color),
            ((kinds == kind) & is_decided, color, "black"),
        ):
            axis.scatter(
                *keys[chosen].T, facecolor=face, edgecolor=edge, marker=marker, s=38, lw=0.9
            )


def _add_legend(axis: Axes, names: Sequence[str]) -> None:
    """Names colours and shapes of classes, and what is large or hollow, beside the map."""
    classes = len(names)
    handles = [
        axis.scatter([], [], color=color, marker=marker, s=38, lw=0, label=name)
        for name, color, marker in zip(
            names, colors_of(classes), markers_of(classes), strict=True
        )
    ]
    for face, edge, size, label in (
        ("grey", "none", 11, "example"),
        ("grey", "black", 38, "learned neighbour"),
        ("white", "grey", 38, "undecided one"),
    ):
        handles.append(
            axis.scatter(
                [], [], facecolor=face, edgecolor=edge, marker="o", s=size, label=label
            )
        )
    axis.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        borderaxespad=0,
        frameon=False,
        fontsize=8 if classes <= 20 else 6,
        ncols=-(-len(handles) // 36),
    )


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


def plot_prototype_cosines(model: MetaNeighborhoodModel, x: Any, y: Any = None) -> Figure:
    """Draws the cosine between features and their true prototype, before and after.

    A prototype is a class's column of the head's kernel, `phi[y]`. Each example is a
    point: the cosine of `z` and `phi[y]` across, that of `z` and the finetuned `phi_z[y]`
    upwards. Above the diagonal, finetuning has turned the prototype towards the example;
    a change of 1e-6 at most is rounding, and counts as none.

    Args:
        model: A built `MetaNeighborhoodModel`, a classifier whose head is one
            `CosineDense` or `Dense` layer.
        x: Inputs, test examples in the paper: an array, several as the model takes them,
            or a data set as for `predict`, which must end.
        y: Their labels, as for `fit`; `None` where a data set has them.

    Returns:
        A matplotlib figure with one panel.

    Raises:
        ValueError: If the head is another, for labels that do not fit, or if the model is
            no classifier.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=12)
    >>> x = np.random.default_rng(0).normal(size=(30, 6)).astype("float32")
    >>> model.build(x.shape)
    >>> figure = nsl_keras.visualize.plot_prototype_cosines(model, x, np.arange(30) % 3)
    >>> figure.axes[0].get_xlabel()
    'cosine to the true prototype, before'

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 4.2, Figure 4.
    """
    require_classifier(model)
    head = model.head
    if type(head) not in (CosineDense, keras.layers.Dense):
        raise ValueError(
            "`model` must have a head of one CosineDense or Dense layer, whose columns are "
            f"the classes' prototypes. Received: head {head.name!r}, a "
            f"{type(head).__name__}"
        )
    x, y = data.gathered(x, y)
    labels = class_numbers(data.require_targets(y), model.dictionary.num_values)
    require_same_length(range(data.length_of(x)), labels, "x")

    def cosines_of_all_classes(batch: Any) -> Tensor:
        features = at_least_float32(model.features(batch, training=False))
        kernel = ops.cast(ops.convert_to_tensor(head.kernel), features.dtype)
        adapted = model.neighborhood.adapted_weights(features)[0]
        directions = unit_norm(features)
        return ops.stack(
            [
                ops.matmul(directions, unit_norm(kernel, axis=0)),
                ops.matmul(directions[:, None, :], unit_norm(adapted, axis=1))[:, 0],
            ],
            axis=1,
        )

    cosines = in_batches(cosines_of_all_classes, x)
    before, after = cosines[np.arange(len(labels)), :, labels].T
    rise = after - before

    figure = new_figure(figsize=(5.2, 5.2))
    axis = figure.subplots()
    lowest, highest = float(min(before.min(), after.min())) - 0.02, 1.02
    axis.plot([lowest, highest], [lowest, highest], color=GREY, linewidth=1, zorder=0)
    groups = [
        (rise > _LEAST_TURN, BLUE, "o", "towards the example"),
        (rise < -_LEAST_TURN, ORANGE, "v", "away from it"),
    ]
    stays = np.abs(rise) <= _LEAST_TURN
    if stays.any():
        groups.append((stays, GREY, "s", "unchanged"))
    for chosen, color, marker, what in groups:
        axis.scatter(
            before[chosen],
            after[chosen],
            c=color,
            s=12,
            alpha=0.55,
            linewidths=0,
            marker=marker,
            label=f"{what}: {100 * chosen.mean():.1f} %",
        )
    axis.set_title(f"Finetuning turns the prototypes of {len(labels)} examples")
    axis.set_xlabel("cosine to the true prototype, before")
    axis.set_ylabel("cosine to the true prototype, after")
    axis.set_xlim(lowest, highest)
    axis.set_ylim(lowest, highest)
    axis.set_aspect("equal")
    axis.legend(loc="lower right", frameon=True, fontsize=9)
    return figure
