"""Pictures of the feature space: entries among examples, and rotated prototypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.neighborhoods.cosine import CosineDense
from nsl_keras.neighborhoods.key_metrics import Cosine, unit_norm
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.training import data
from nsl_keras.visualize import figures, reading

#: A smaller change of a cosine may be rounding.
_LEAST_TURN = 1e-6


def plot_feature_map(
    model: MetaNeighborhoodModel,
    x: Any,
    y: Any = None,
    method: str = "pca",
    class_names: Sequence[str] | None = None,
    seed: int = 0,
) -> figures.Figure:
    """Draws the dictionary's keys among the features of examples, in two dimensions.

    Colours and shapes are classes. An entry has the most probable class of its value; its
    mark is large, and hollow if that class has less than 50 %. With the cosine metric all
    vectors are first scaled to unit length.

    Args:
        Same as `plot_learned_neighbors`, plus:
        x: Inputs, in the paper training examples: an array, several inputs, or a finite
            data set.
        y: Their labels, as for `fit`; `None` if a data set has them.
        method: `"pca"`, the plane of the two largest principal components of the examples,
            or `"tsne"`, t-SNE of examples and entries together (needs scikit-learn).
        seed: int, the seed of t-SNE.

    Raises:
        ValueError: If `method` is unknown, there are fewer than two examples or features,
            labels do not fit, or the model is not a classifier.
        ImportError: For t-SNE without scikit-learn.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=12)
    >>> x = np.random.default_rng(0).normal(size=(30, 6)).astype("float32")
    >>> model.build(x.shape)
    >>> figure = nsl_keras.visualize.plot_feature_map(model, x, np.arange(30) % 3)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 4.2, Figure 5 (t-SNE).
    """
    reading.require_classifier(model)
    method = validation.one_of(method, ("pca", "tsne"), "method")
    values = ops.convert_to_numpy(model.dictionary.values)
    x, y = data.gather(x, y)
    labels = reading.class_numbers(y, x, values.shape[1])
    names = reading.names_of(values.shape[1], class_names)
    # NumPy's linear algebra has no half precision.
    examples = data.predict(model.features, model, x).astype("float32")
    keys = ops.convert_to_numpy(model.dictionary.keys).astype("float32")
    if min(examples.shape) < 2:
        raise ValueError(
            "`x` must have at least two examples of at least two features for a map. "
            f"Received: features of shape {examples.shape}"
        )
    if isinstance(model.dictionary.metric, Cosine):
        examples, keys = map(keras.utils.normalize, (examples, keys))
    if method == "pca":
        examples, keys, axis_labels = _principal_plane(examples, keys)
    else:
        examples, keys = _neighbor_embedding(examples, keys, seed)
        axis_labels = ["t-SNE 1", "t-SNE 2"]

    figure = figures.new_figure(7.6, 5.6)
    axis = figure.subplots()
    kinds, is_decided = values.argmax(axis=1), values.max(axis=1) >= reading.UNDECIDED
    looks = figures.looks_of(len(names))
    for kind, (color, marker) in enumerate(looks):
        places = examples[labels == kind]
        axis.scatter(*places.T, color=color, marker=marker, s=12, alpha=0.5, lw=0)
    for kind, (color, marker) in enumerate(looks):
        options = {"marker": marker, "s": 38, "lw": 0.9}
        places = keys[(kinds == kind) & ~is_decided]
        axis.scatter(*places.T, facecolor="white", edgecolor=color, **options)
        places = keys[(kinds == kind) & is_decided]
        axis.scatter(*places.T, facecolor=color, edgecolor="black", **options)
        axis.scatter([], [], color=color, marker=marker, s=38, lw=0, label=names[kind])
    for face, edge, size, label in (
        ("grey", "none", 11, "example"),
        ("grey", "black", 38, "learned neighbour"),
        ("white", "grey", 38, "undecided one"),
    ):
        axis.scatter([], [], facecolor=face, edgecolor=edge, s=size, label=label)
    columns = -(-len(names) // 33)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8, ncols=columns)
    axis.set_title(f"{len(labels)} examples and {len(keys)} learned neighbours")
    axis.set_xlabel(axis_labels[0])
    axis.set_ylabel(axis_labels[1])
    axis.set_xticks([])
    axis.set_yticks([])
    return figure


def _principal_plane(
    examples: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Returns both in the plane of the examples' components, and the names of the axes."""
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
) -> tuple[np.ndarray, np.ndarray]:
    """Returns both in a joint t-SNE."""
    from sklearn.manifold import TSNE

    together = np.concatenate([examples, keys])
    perplexity = min(30.0, (len(together) - 1) / 3)
    embedding = TSNE(perplexity=perplexity, init="pca", random_state=seed)
    places = embedding.fit_transform(together)
    return places[: len(examples)], places[len(examples) :]


def plot_prototype_cosines(
    model: MetaNeighborhoodModel, x: Any, y: Any = None
) -> figures.Figure:
    """Draws the cosine between features and their true prototype, before and after.

    A prototype is a class's column of the head's kernel, `phi[y]`. Each example is a
    point: horizontally the cosine of `z` and `phi[y]`, vertically that of `z` and finetuned
    `phi_z[y]`. Above the diagonal, finetuning has turned the prototype towards the
    example. Changes of at most 1e-6 are rounding and count as none.

    Args:
        Same as `plot_feature_map`, plus:
        model: A built `MetaNeighborhoodModel`, a classifier whose head is one
            `CosineDense` or `Dense` layer.

    Raises:
        ValueError: If the model is not a classifier, its head is another layer, or labels
            do not fit.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=12)
    >>> x = np.random.default_rng(0).normal(size=(30, 6)).astype("float32")
    >>> model.build(x.shape)
    >>> figure = nsl_keras.visualize.plot_prototype_cosines(model, x, np.arange(30) % 3)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 4.2, Figure 4.
    """
    reading.require_classifier(model)
    head = model.head
    if type(head) not in (CosineDense, keras.layers.Dense):
        raise ValueError(
            "`model` must have a head of one CosineDense or Dense layer, whose columns are "
            f"the classes' prototypes. Received: head {head.name!r}, a "
            f"{type(head).__name__}"
        )
    x, y = data.gather(x, y)
    labels = reading.class_numbers(y, x, head.units)

    def cosines(batch: Any) -> Tensor:
        features = ops.cast(model.features(batch, training=False), "float32")
        kernels = [head.kernel[None], model.neighborhood.adapted_weights(features)[0]]
        directions = unit_norm(features)[:, :, None]
        columns = [unit_norm(ops.cast(each, "float32"), axis=1) for each in kernels]
        return ops.stack([ops.sum(directions * each, axis=1) for each in columns], axis=-1)

    found = data.predict(cosines, model, x)[np.arange(len(labels)), labels]
    before, after = found.T
    rise = after - before

    figure = figures.new_figure(5.2, 5.2)
    axis = figure.subplots()
    limits = [float(found.min()) - 0.02, 1.02]
    axis.plot(limits, limits, color=figures.GREY, linewidth=1, zorder=0)
    for chosen, color, marker, what in (
        (rise > _LEAST_TURN, figures.BLUE, "o", "towards the example"),
        (rise < -_LEAST_TURN, figures.ORANGE, "v", "away from it"),
        (np.abs(rise) <= _LEAST_TURN, figures.GREY, "s", "unchanged"),
    ):
        label = f"{what}: {100 * chosen.mean():.1f} %"
        options = {"s": 12, "alpha": 0.55, "lw": 0, "label": label}
        axis.scatter(before[chosen], after[chosen], c=color, marker=marker, **options)
    axis.set_title(f"Finetuning turns the prototypes of {len(labels)} examples")
    axis.set_xlabel("cosine to the true prototype, before")
    axis.set_ylabel("cosine to the true prototype, after")
    axis.set(xlim=limits, ylim=limits, aspect="equal")
    axis.legend(loc="lower right", fontsize=9)
    return figure
