"""Pictures of the feature space: entries among examples, and rotated prototypes."""

from collections.abc import Sequence
from typing import Any

import keras
import matplotlib
import numpy as np
from keras import ops
from sklearn.manifold import TSNE

from experiments.common.data import Split
from experiments.common.pictures import in_batches
from nsl_keras import MetaNeighborhoodModel
from nsl_keras.key_metrics import Cosine
from nsl_keras.visualize.figures import BLUE, GREY, ORANGE, new_figure

#: Ten colors for color-blind readers (M. A. Petroff, 2021), and ten shapes.
_COLORS = [
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
]
_MARKERS = "os^vDPX<>*"

#: A smaller change of a cosine may be rounding.
_LEAST_TURN = 1e-6


def plot_feature_map(
    model: MetaNeighborhoodModel, examples: Split, names: Sequence[str]
) -> Any:
    """Figure 5: the dictionary's keys among the features of examples, in a joint t-SNE.

    Colors and shapes are classes. An entry has the most probable class of its value; its
    mark is large, and hollow if that class has less than 50 %. With the cosine metric all
    vectors are first scaled to unit length.
    """
    values = ops.convert_to_numpy(model.dictionary.values)
    features = in_batches(model.features, examples.images).astype("float32")
    keys = ops.convert_to_numpy(model.dictionary.keys).astype("float32")
    if isinstance(model.dictionary.metric, Cosine):
        features, keys = map(keras.utils.normalize, (features, keys))
    together = np.concatenate([features, keys])
    perplexity = min(30.0, (len(together) - 1) / 3)
    embedding = TSNE(perplexity=perplexity, init="pca", random_state=0)
    places = embedding.fit_transform(together)
    features, keys = places[: len(features)], places[len(features) :]

    figure = new_figure(7.6, 5.6)
    axis = figure.subplots()
    kinds, is_decided = values.argmax(axis=1), values.max(axis=1) >= 0.5
    colors: Any = _COLORS
    if len(names) > len(_COLORS):
        colors = matplotlib.colormaps["viridis"](np.linspace(0, 1, len(names)))
    looks = [(colors[kind], _MARKERS[kind % 10]) for kind in range(len(names))]
    for kind, (color, marker) in enumerate(looks):
        places = features[examples.labels == kind]
        axis.scatter(*places.T, color=color, marker=marker, s=12, alpha=0.5, lw=0)
    for kind, (color, marker) in enumerate(looks):
        options = {"marker": marker, "s": 38, "lw": 0.9}
        places = keys[(kinds == kind) & ~is_decided]
        axis.scatter(*places.T, facecolor="white", edgecolor=color, **options)
        places = keys[(kinds == kind) & is_decided]
        axis.scatter(*places.T, facecolor=color, edgecolor="black", **options)
        axis.scatter([], [], color=color, marker=marker, s=38, lw=0, label=names[kind])
    for face, edge, size, label in (
        ("gray", "none", 11, "example"),
        ("gray", "black", 38, "learned neighbor"),
        ("white", "gray", 38, "undecided one"),
    ):
        axis.scatter([], [], facecolor=face, edgecolor=edge, s=size, label=label)
    columns = -(-len(names) // 33)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8, ncols=columns)
    axis.set_title(f"{len(features)} examples and {len(keys)} learned neighbors")
    axis.set(xlabel="t-SNE 1", ylabel="t-SNE 2", xticks=[], yticks=[])
    return figure


def prototype_cosines(model: MetaNeighborhoodModel, examples: Split) -> np.ndarray:
    """The cosine between features and their true prototype, before and after, `(2, n)`.

    A prototype is a class's column of the head's kernel, `phi[y]`; the head is one layer.
    """

    def unit(vectors: Any, axis: int) -> Any:
        return ops.normalize(ops.cast(vectors, "float32"), axis)

    def cosines(batch: Any) -> Any:
        features = model.features(batch, training=False)
        adapted = model.neighborhood.adapted_weights(features)[0]
        columns = [unit(each, 1) for each in (model.head.kernel[None], adapted)]
        directions = unit(features, -1)[:, :, None]
        return ops.stack([ops.sum(directions * each, axis=1) for each in columns], axis=-1)

    found = in_batches(cosines, examples.images)
    return found[np.arange(len(found)), examples.labels].T


def rising_share(model: MetaNeighborhoodModel, examples: Split) -> float:
    """The share of these cosines that finetuning increases."""
    before, after = prototype_cosines(model, examples)
    return float(np.mean(after - before > _LEAST_TURN))


def plot_prototype_cosines(model: MetaNeighborhoodModel, examples: Split) -> Any:
    """Figure 4: the cosine between features and their true prototype, before and after.

    Each example is a point: horizontally the cosine of `z` and `phi[y]`, vertically that of
    `z` and finetuned `phi_z[y]`. Above the diagonal, finetuning has turned the prototype
    towards the example.
    """
    before, after = found = prototype_cosines(model, examples)
    rise = after - before

    figure = new_figure(5.2, 5.2)
    axis = figure.subplots()
    limits = [float(found.min()) - 0.02, 1.02]
    axis.plot(limits, limits, color=GREY, linewidth=1, zorder=0)
    for chosen, color, marker, what in (
        (rise > _LEAST_TURN, BLUE, "o", "towards the example"),
        (rise < -_LEAST_TURN, ORANGE, "v", "away from it"),
        (np.abs(rise) <= _LEAST_TURN, GREY, "s", "unchanged"),
    ):
        label = f"{what}: {100 * chosen.mean():.1f} %"
        options = {"s": 12, "alpha": 0.55, "lw": 0, "label": label}
        axis.scatter(before[chosen], after[chosen], c=color, marker=marker, **options)
    axis.set_title(f"Finetuning turns the prototypes of {len(rise)} examples")
    axis.set_xlabel("cosine to the true prototype, before")
    axis.set_ylabel("cosine to the true prototype, after")
    axis.set(xlim=limits, ylim=limits, aspect="equal")
    axis.legend(loc="lower right", fontsize=9)
    return figure
