"""Pictures of predictions: similar training images, and what each entry adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import at_least_float32
from nsl_keras.neighborhoods.dictionary import classes_of
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.training import data
from nsl_keras.visualize import figures

#: The maximum number of classes that are drawn, the most probable ones.
_MOST_CLASSES = 12

#: The darkest color stands for a change of at least this much.
LEAST_CHANGE = 0.01


def plot_neighbors(
    model: MetaNeighborhoodModel,
    x: Any,
    examples: Any,
    labels: Any = None,
    k: int = 5,
    class_names: Sequence[str] | None = None,
    y: Any = None,
) -> Any:
    """Draws predictions, each beside the training images that the model finds most similar.

    Each dictionary entry is represented by the example nearest to it, with labels by the
    nearest one of its own class. Below an example are its label and its similarity: the
    largest score of the key metric (by default the cosine) between the image and an entry
    that the example represents.

    Args:
        model: A built `MetaNeighborhoodModel` that classifies.
        x: The images to explain, one row each, as the model takes them: an array, several
            inputs (the first input of images is drawn), or a finite data set. Values
            outside [0, 1] are scaled.
        examples: Training images to choose neighbors from, in the form of `x`.
        labels: Labels of the examples. `None` takes those that a data set yields, if any.
        k: int, the number of neighbors, at most the number of examples that represent an
            entry.
        class_names: Names of the classes; `None` numbers them.
        y: Labels of `x`, as for `labels`. They show which predictions are wrong.

    Raises:
        ValueError: If `x` or `examples` contains no images, `labels` or `y` do not fit, `k`
            is out of range, or the model is no classifier.

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
    _require_neighbors(model)
    x, y = data.gather(x, y)
    examples, labels = data.gather(examples, labels)
    queries = figures.require_images(model, x, "x")
    pictures = figures.require_images(model, examples, "examples")
    found = model.neighbors(x, k=1)
    names = _names_of(found.after, class_names)
    before, after = (_named(each, names) for each in (found.before, found.after))
    of_examples = _labels(labels, names, len(pictures), "labels")
    truths = _labels(y, names, len(queries), "y")

    nearest = model.nearest_examples(examples, labels)
    demand = "at most the number of examples nearest to an entry"
    fits = validation.positive_integer(k, "k") <= len({*nearest})
    validation.require(fits, "k", demand, k)
    features = data.predict(model.features, model, x)
    pair = map(at_least_float32, (features, model.dictionary.keys))
    similarity = np.full((len(queries), len(pictures)), -np.inf)
    scores = ops.convert_to_numpy(model.dictionary.metric(*pair))
    np.maximum.at(similarity.T, nearest, scores.T)
    ranked = np.argsort(-similarity, axis=1, kind="stable")[:, :k]

    figure = figures.new_figure(1.05 * (k + 1) + 0.5, 1.5 * len(queries) + 0.3)
    panels = figure.subplots(len(queries), k + 1, squeeze=False)
    shown = figures.display_range(queries, pictures)
    for row, (first, *others) in enumerate(panels):
        lines, color = [after[row]], "black"
        if before[row] != after[row]:
            lines += [f"before: {before[row]}"]
        if truths:
            wrong = after[row] != truths[row]
            color = figures.ORANGE if wrong else figures.BLUE
            lines += [f"{'wrong, true' if wrong else 'true'}: {truths[row]}"]
        figures.draw_image(first, queries[row], shown, "\n".join(lines), color)
        for axis, index in zip(others, ranked[row], strict=True):
            text = f"{of_examples[index]}\n" if of_examples else ""
            text += f"{similarity[row, index]:.2f}"
            figures.draw_image(axis, pictures[index], shown, text)
    panels[0, 0].set_title("predicted", fontsize=9, loc="left")
    panels[0, 1].set_title("neighbors, with their similarity", fontsize=9, loc="left")
    return figure


def plot_adaptation(
    model: MetaNeighborhoodModel,
    example: Any,
    k: int = 6,
    images: Any = None,
    class_names: Sequence[str] | None = None,
) -> Any:
    """Draws what adaptation does to one prediction: neighbors, weights, and effects.

    The top shows the prediction before and after adaptation. Below it are the `k` entries
    that moved the prediction most, with their class and attention, and what each of them,
    all others and the sum add to every logit (see `MetaNeighborhoodModel.neighbors`). The
    title says "no effect" if no logit changes by more than 0.01.

    Args:
        model: A built `MetaNeighborhoodModel` that classifies.
        example: One input without batch axis, or a list or dict of inputs. The first input
            that is an image is drawn.
        k: int, the number of entries, at most `num_neighbors`.
        images: Training images as for `plot_neighbors`, or `None`. The image nearest to
            each entry is drawn beside it.
        class_names: Names of the classes; `None` numbers them. At most the 12 most probable
            classes are drawn.

    Raises:
        ValueError: If `k` is not in `1..num_neighbors`, the model is not built or no
            classifier, or `example` has a batch axis.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=12)
    >>> x = np.random.default_rng(0).normal(size=(30, 6)).astype("float32")
    >>> model.build(x.shape)
    >>> figure = nsl_keras.visualize.plot_adaptation(model, x[0], k=4)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.1, Eq. (3).
    """
    _require_neighbors(model)
    batch = figures.batch_of_one(example)
    found = model.neighbors(batch, k, by="effect")
    names = _names_of(found.after, class_names)
    entries, weights, values, effects, before, after = (part[0] for part in found)
    changes = np.stack([*effects, after - before - effects.sum(axis=0), after - before])
    scale = max(float(np.abs(changes).max()), LEAST_CHANGE)
    parts = zip(entries, _named(values, names), weights, strict=True)
    rows = [f"entry {entry}: {top}, attention {w:.1%}" for entry, top, w in parts]
    rows += ["all other entries", "sum"]
    before, after = map(ops.convert_to_numpy, map(ops.softmax, (before, after)))
    ranked = np.argsort(-np.maximum(before, after), kind="stable")
    drawn = np.sort(ranked[:_MOST_CLASSES])
    columns, places = [names[index] for index in drawn], range(len(drawn))

    widths = [1.3, max(0.6 * len(drawn), 3.0) + 3.0]
    heights = [1.9, 0.45 * len(rows)]
    figure = figures.new_figure(sum(widths), sum(heights) + 1.0)
    mosaic = [["example", "classes"], ["nearest", "changes"]]
    axes = figure.subplot_mosaic(mosaic, width_ratios=widths, height_ratios=heights)
    bars, table = axes["classes"], axes["changes"]
    for shift, color, when, shares in (
        (-0.2, figures.GREY, "before", before),
        (0.2, figures.BLUE, "after", after),
    ):
        label = f"{when}: {names[shares.argmax()]}, {shares.max():.0%}"
        bars.bar(np.add(places, shift), shares[drawn], 0.38, color=color, label=label)
    bars.set_ylabel("probability", fontsize=9)
    bars.set(xlim=(-0.5, len(drawn) - 0.5), xticks=[])
    bars.legend(fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))

    changes = changes[:, drawn]
    colors = figures.draw_matrix(table, changes, scale, changes, "auto")
    no_effect = ": no effect" if scale == LEAST_CHANGE else ""
    table.set_title(f"change of each logit{no_effect}", fontsize=9)
    table.set_xticks(places, columns, fontsize=8, rotation=40, ha="right")
    table.set_yticks(range(len(rows)), rows, fontsize=8)
    figures.add_color_bar(figure, colors, table, "change of the logit")

    picture = figures.images_in(model, batch)
    inputs = batch if images is None else data.gather(images)[0]
    pictures = figures.images_in(model, inputs)
    axes["example"].set_axis_off()
    axes["nearest"].set_axis_off()
    if picture is None or pictures is None:
        return figure
    shown = figures.display_range(picture, pictures)
    figures.draw_image(axes["example"], picture[0], shown)
    axes["example"].set_title("example", fontsize=9)
    if images is not None:
        axes["nearest"].set_title("nearest image", fontsize=9, loc="left")
        for row, index in enumerate(model.nearest_examples(inputs)[entries]):
            place = (0, 1 - (row + 0.95) / len(rows), 1, 0.9 / len(rows))
            panel = axes["nearest"].inset_axes(place)
            figures.draw_image(panel, pictures[index], shown)
    return figure


def _require_neighbors(model: Any) -> None:
    is_classifier = getattr(model, "task", None) == "classification"
    demand = "a `MetaNeighborhoodModel` of classes, for example of `from_classifier`"
    validation.require(is_classifier, "model", demand, model)


def _names_of(logits: np.ndarray, class_names: Sequence[str] | None) -> list[str]:
    names = range(logits.shape[1]) if class_names is None else class_names
    demand = f"{logits.shape[1]} names, one per class"
    validation.require(len(names) == logits.shape[1], "class_names", demand, class_names)
    return [str(name) for name in names]


def _named(outputs: np.ndarray, names: list[str]) -> list[str]:
    return [names[index] for index in outputs.argmax(axis=1)]


def _labels(labels: Any, names: list[str], examples: int, argument: str) -> list[str]:
    """Returns the names of labels, one-hot or not; none for `None`."""
    if labels is None:
        return []
    validation.require_one_per_example(labels, examples, argument)
    validation.require_class_labels(labels, len(names), argument)
    return [names[each] for each in classes_of(labels)]
