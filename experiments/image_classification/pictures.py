"""The paper's pictures of trained image classifiers, of their neighbors, and of records."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import matplotlib.pyplot as plt
import numpy as np
from keras import ops
from sklearn.neighbors import KNeighborsClassifier

from experiments.common import tables
from experiments.common.data import ImageData, Split
from experiments.common.pictures import SHOWN, attention_of, grid_of_images, of_adaptation
from experiments.image_classification import features
from nsl_keras import MetaNeighborhoodModel
from nsl_keras.visualize.figures import BLUE, ORANGE, display_range, draw_image

_LIGHT_BLUE = "#B5D4E9"
#: At most this many entries are drawn.
_MOST_ROWS = 12
#: The paper names neither the number of neighbors nor the metric; here it is the cosine.
NEAREST = 5
#: Of these the nearest training images are sought for pictures of sub-categories.
QUERIES = 1000


def of_neighbors(models: Mapping[str, keras.Model], data: ImageData) -> dict[str, object]:
    """Figures 4, 5 and 9 of the paper, and one prediction of each adapting model."""
    figures: dict[str, object] = {}
    train, test, names = data.train.take(SHOWN), data.test.take(SHOWN), data.class_names
    for name, model in models.items():
        if not isinstance(model, MetaNeighborhoodModel):
            continue
        figures[f"{name}_feature_map"] = features.plot_feature_map(model, train, names)
        cosines = features.plot_prototype_cosines(model, test)
        figures[f"{name}_prototype_cosines"] = cosines
        figures[f"{name}_entries"] = plot_entries(model, test.images, names)
        figures[f"{name}_adaptation"] = of_adaptation(model, data, test)
    return figures


def of_subcategories(
    models: Mapping[str, keras.Model], data: ImageData
) -> dict[str, object]:
    """Figure 6: test images and the training images nearest to them, by fine labels."""
    train, queries = data.train.take(5 * SHOWN), data.test.take(QUERIES)
    return {
        f"{name}_subcategories": plot_subcategories(model, train, queries, data.class_names)
        for name, model in models.items()
    }


def in_training(_setting: dict, found: list[dict], titles: dict[str, str]) -> Any:
    """Figure 7: accuracies on validation images in training; `None` if no run has them."""
    found = [run for run in found if "validation_curve" in run]
    if not found:
        return None
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for number, (method, title) in enumerate(titles.items()):
        for index, run in enumerate(tables.of_method(found, method)):
            steps, accuracies = np.transpose(run["validation_curve"])
            label = None if index else title
            axis.plot(steps, 100 * accuracies, color=f"C{number}", label=label)
    axis.set_xlabel("steps")
    axis.set_ylabel("validation accuracy, %")
    axis.legend()
    return figure


def by_dictionary(setting: dict, found: list[dict], titles: dict[str, str]) -> Any:
    """Figure 8: accuracies by numbers of entries and by inverse temperatures, if any."""
    accuracies = {name: tables.percent(found, name, "test_accuracy") for name in titles}
    # Seeds that one method lacks would shift its point.
    ran = {name: each for name, each in accuracies.items() if each}
    shared = set.intersection(*map(set, ran.values())) if ran else set()
    if not shared:
        return None
    means = {name: np.mean([each[seed] for seed in shared]) for name, each in ran.items()}
    dictionary = setting["dictionary"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    for axis, kind, name, unit in (
        (axes[0], "size", "entries, S", dictionary["num_neighbors"]),
        (axes[1], "peak", "1/T", 1 / dictionary["temperature"]),
    ):
        points = {}
        for method, mean in means.items():
            which, _, factor = method.partition(f"_{kind}_")
            if which == "neighborhoods":
                points[unit * float(factor or 1)] = mean
        axis.plot(
            *np.transpose(sorted(points.items())), "o-", label=titles["neighborhoods"]
        )
        if "plain" in means:
            plain = means["plain"]
            axis.axhline(plain, color="black", linestyle=":", label=titles["plain"])
        axis.set_xscale("log")
        axis.set_xlabel(name)
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend()
    return figure


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


def described(model: keras.Model, images: np.ndarray) -> np.ndarray:
    """Images by their attention over the dictionary, or by a plain model's features."""
    if isinstance(model, MetaNeighborhoodModel):
        return attention_of(model, images)
    return model.layers[0].predict(images, verbose=0)


def nearest_images(model: keras.Model, train: Split, nearest: int = NEAREST) -> Any:
    """The vote of the nearest training images, to be asked about `described` ones."""
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
        draw_image(query, queries.images[row], display_range(queries.images), names[label])
        query.xaxis.label.set_weight("bold")
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
