"""A picture of one prediction taken apart: neighbours, weights, and their effects."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops, tree

from nsl_keras import data, validation
from nsl_keras.neighborhoods.explain import Neighbors, attention_of, names_of
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.visualize.figures import (
    BLUE,
    GREY,
    ORANGE,
    Axes,
    Figure,
    decimals_for,
    display_range,
    draw_image,
    images_in,
    name_columns,
    new_figure,
    percentage,
    require_images,
    signed,
    write_on_cells,
)

#: Outputs that are drawn; of more, those with the most probability or change.
_MOST_OUTPUTS = 12

#: The change of a logit, and of a regression's outputs in parts of the largest, below
#: which a prediction does not move: colours do not show less, and the picture says so.
LEAST_CHANGE = 0.01

_COLUMN = 0.6


def plot_adaptation(
    model: MetaNeighborhoodModel,
    example: Any,
    k: int = 6,
    images: Any = None,
    class_names: Sequence[str] | None = None,
    invert: bool = False,
) -> Figure:
    """Draws what a model does for one example: neighbours, weights, and their effects.

    Above: the prediction before and after adaptation. Below: the `k` entries with the
    largest attention weights, with what each adds to every logit (see
    `MetaNeighborhoodModel.neighbors`); then what all other entries add, and the sum. Where
    no logit changes by 0.01, nor an output of a regression by a hundredth of the largest,
    the picture says that the adaptation has no effect.

    Args:
        model: A built `MetaNeighborhoodModel`; in regression its outputs are drawn.
        example: One input, without batch axis; a list or dict of them for a model of
            several inputs. The first that is an image is drawn.
        k: int, the number of entries; at most `num_neighbors`.
        images: Images, `(n, height, width, channels)`, several inputs as the model takes
            them, or a data set as for `predict`, which must end; beside each entry the one
            that looks at it most is drawn. `None` leaves them out.
        class_names: Names of the classes or outputs; `None` numbers them. Of more than 12
            those with the most probability (in regression, change) are drawn.
        invert: bool, whether grey images are drawn as negatives.

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
    >>> [axis.get_ylabel() for axis in figure.axes[:2]]
    ['probability', '']

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.1, Eq. (3).
    """
    k = validation.positive_integer(k, "k")
    batch = tree.map_structure(lambda part: part[None], data.arrays_of(example))
    prediction = _Prediction.of(model, batch, k, class_names)
    count = len(prediction.names)
    picture = images_in(batch)
    inputs = None if images is None else data.gathered(images)[0]
    pictures = None if inputs is None else require_images(inputs, "images")
    # One scale for all: an example alone need not reach black and white.
    stacks = [each for each in (picture, pictures) if each is not None]
    shown = display_range(*stacks) if stacks else (0.0, 1.0)

    widths = [1.5, 1.8, max(_COLUMN * count, 2.4), 0.12]
    heights = [1.6, 0.42 * k, 0.84]
    # Room for what stands beside and below the panels.
    longest = max(map(len, prediction.names))
    beside = 0.06 * max(longest, *map(len, prediction.labels))
    below = 0.045 * longest
    figure = new_figure(
        figsize=(
            sum(widths) + max(1.5, beside + 0.8),
            sum(heights) + max(1.9, 1 + 2 * below),
        )
    )
    grid = figure.add_gridspec(3, 4, width_ratios=widths, height_ratios=heights)
    inches = widths[2] / count

    top = figure.add_subplot(grid[0, 2])
    _draw_predictions(top, prediction, inches)
    if prediction.is_classifier:
        _tell(figure.add_subplot(grid[0, 1]), prediction)
    bars = figure.add_subplot(grid[1, 1])
    _draw_weights(bars, prediction)
    each = figure.add_subplot(grid[1, 2])
    drawn = _draw_changes(each, prediction.of_entries, prediction)
    each.set_title(f"change of each {prediction.unit}{prediction.verdict}", fontsize=9)
    whole = figure.add_subplot(grid[2, 2])
    _draw_changes(whole, np.stack([prediction.of_others, prediction.change]), prediction)
    name_columns(whole, prediction.names, inches)
    rows = figure.add_subplot(grid[2, 1], sharey=whole)
    rows.set_axis_off()
    rest = model.num_neighbors - k
    weight = max(1 - float(prediction.found.weights.sum()), 0.0)
    for row, text in enumerate((f"{rest} others, weight {weight:.2f}", "sum of all")):
        rows.text(1, row, text, ha="right", va="center", fontsize=8)
    bar = figure.colorbar(drawn, cax=figure.add_subplot(grid[1:, 3]))
    bar.set_label(f"change of the {prediction.unit}", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    if picture is not None:
        axis = figure.add_subplot(grid[0, 0])
        draw_image(axis, picture[0], shown, invert)
        axis.set_title("example", fontsize=9)
    if pictures is not None:
        frame = figure.add_subplot(grid[1, 0])
        frame.set_axis_off()
        frame.set_title("nearest image", fontsize=9)
        nearest = attention_of(model, inputs)[:, prediction.found.indices].argmax(axis=0)
        for row, index in enumerate(nearest):
            place = (0, 1 - (row + 0.95) / k, 1, 0.9 / k)
            draw_image(frame.inset_axes(place), pictures[index], shown, invert)
    return figure


@dataclasses.dataclass(frozen=True)
class _Prediction:
    """One prediction, and what the entries do to it.

    Attributes:
        before: Outputs before adaptation: probabilities in a classification.
        after: The same after it.
        change: Change of the logits, or of a regression's outputs.
        found: The entries; their values and `output_changes` are those of all outputs.
        of_entries: What each entry adds to the drawn outputs.
        names: Names of the drawn outputs.
        kinds: Name of each entry's class; none in a regression.
        least: The largest change that counts as none.
        is_part: Whether there are more outputs than those drawn.
    """

    before: np.ndarray
    after: np.ndarray
    change: np.ndarray
    found: Neighbors
    of_entries: np.ndarray
    names: list[str]
    kinds: list[str]
    least: float
    is_part: bool

    @classmethod
    def of(
        cls, model: Any, batch: Any, k: int, class_names: Sequence[str] | None
    ) -> _Prediction:
        found = Neighbors(*(part[0] for part in model.neighbors(batch, k)))
        before, after = (
            ops.convert_to_numpy(
                model(data.as_tensors(batch), training=False, adapt=adapt)
            )[0].astype("float32")
            for adapt in (False, True)
        )
        names = names_of(len(before), class_names)
        change = after - before
        kinds: list[str] = []
        least = LEAST_CHANGE
        importance = np.abs(change)
        if model.task == "classification":
            before, after = _softmax(before), _softmax(after)
            kinds = [
                f"{names[value.argmax()]}, {percentage(value.max())}"
                for value in found.values
            ]
            importance = np.maximum(before, after)
        else:
            least *= max(float(np.abs(before).max()), 1e-12)
        chosen = np.sort(np.argsort(-importance, kind="stable")[:_MOST_OUTPUTS])
        return cls(
            before[chosen],
            after[chosen],
            change[chosen],
            found,
            found.output_changes[:, chosen],
            [names[index] for index in chosen],
            kinds,
            least,
            len(chosen) < len(names),
        )

    @property
    def is_classifier(self) -> bool:
        return bool(self.kinds)

    @property
    def unit(self) -> str:
        return "logit" if self.is_classifier else "output"

    @property
    def of_others(self) -> np.ndarray:
        """What all other entries add."""
        return self.change - self.of_entries.sum(axis=0)

    @property
    def largest(self) -> float:
        """The largest of all changes."""
        parts = (self.of_entries, self.of_others, self.change)
        return max(float(np.abs(part).max()) for part in parts)

    @property
    def labels(self) -> list[str]:
        """What is written beside the entries."""
        labels = [f"entry {index}" for index in self.found.indices]
        if not self.is_classifier:
            return labels
        return [f"{label}: {kind}" for label, kind in zip(labels, self.kinds, strict=True)]

    @property
    def verdict(self) -> str:
        """Says that nothing happens, where nothing does."""
        if self.largest >= self.least:
            return ""
        return f"\nno effect, none moves by more than {_rounded_up(self.largest)}"


def _draw_predictions(axis: Axes, prediction: _Prediction, inches: float) -> None:
    if prediction.is_classifier:
        axis.set_ylim(0, 1)
    places = np.arange(len(prediction.names))
    for shift, values, color, label in (
        (-0.2, prediction.before, GREY, "before adaptation"),
        (0.2, prediction.after, BLUE, "after"),
    ):
        axis.bar(places + shift, values, 0.38, color=color, label=label)
    name_columns(axis, prediction.names, inches)
    axis.set_xlim(-0.5, len(prediction.names) - 0.5)
    axis.set_ylabel("probability" if prediction.is_classifier else "output", fontsize=9)
    axis.tick_params(axis="y", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    if prediction.is_part:
        axis.set_title("the most probable outputs", fontsize=8, loc="right")


def _tell(axis: Axes, prediction: _Prediction) -> None:
    """Says what is predicted, before and after."""
    axis.set_axis_off()
    for height, when, values, color in (
        (0.62, "before", prediction.before, "#5f5f5f"),
        (0.38, "after", prediction.after, BLUE),
    ):
        top = int(values.argmax())
        axis.text(
            0.92,
            height,
            f"{when}: {prediction.names[top]}, {percentage(values[top])}",
            ha="right",
            va="center",
            fontsize=10,
            color=color,
            weight="bold",
        )


def _draw_weights(axis: Axes, prediction: _Prediction) -> None:
    found = prediction.found
    places = np.arange(len(found.indices))
    axis.barh(places, found.weights, color=ORANGE, height=0.6)
    axis.set_yticks(places, prediction.labels, fontsize=8)
    axis.set_ylim(len(places) - 0.5, -0.5)
    axis.set_title("attention weight", fontsize=9)
    axis.tick_params(axis="x", labelsize=8)
    axis.locator_params(axis="x", nbins=3)
    axis.spines[["top", "right"]].set_visible(False)


def _draw_changes(axis: Axes, changes: np.ndarray, prediction: _Prediction) -> Any:
    """A row of colours with numbers, on one scale for all rows: blue up, red down."""
    largest = max(prediction.largest, prediction.least)
    drawn = axis.imshow(
        changes,
        cmap="RdBu",
        vmin=-largest,
        vmax=largest,
        aspect="auto",
        interpolation="nearest",
    )
    axis.set_xticks([])
    axis.set_yticks([])
    decimals = decimals_for(largest)
    write_on_cells(
        axis, lambda value: signed(value, decimals), changes, changes, largest, fontsize=7.5
    )
    return drawn


def _rounded_up(value: float) -> str:
    """The least number of one digit that a positive number does not exceed."""
    if value <= 0:
        return "0"
    unit = 10.0 ** np.floor(np.log10(value))
    return f"{np.ceil(value / unit) * unit:.1g}"


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()
