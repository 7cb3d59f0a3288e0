"""Curves: how twins train, and what a method costs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from nsl_keras.visualize.figures import GREY, MARKERS, Axes, Figure, colors_of, new_figure

_MOST_COLUMNS = 3

#: What a history holds besides metrics.
_NO_METRICS = ("learning_rate",)


def plot_training_curves(
    histories: Mapping[str, Any] | keras.callbacks.History,
    metrics: Sequence[str] | str | None = None,
    x_label: str = "epoch",
) -> Figure:
    """Draws how models train side by side: the mean of several seeds, and their spread.

    Each panel is a metric, each colour a model. Where any metric is known on validation
    data, solid lines are those, and dashed ones are what was measured in training; else
    these are solid. Each is the mean over the model's runs, and the band reaches from the
    lowest run to the highest. A `History` knows its epochs; a dict's are counted from 1.
    With fewer values than epochs they are those of each n-th epoch (`validation_freq`).

    Args:
        histories: What `fit` returned (`keras.callbacks.History`, or its `history` dict)
            by the model's name; a list of them, one a seed, for a spread. A single
            `History` stands for itself, by the name of its model.
        metrics: Names of the metrics, or a single one, without `val_`; `None` takes all
            that the models have in common.
        x_label: What an entry of a history is.

    Returns:
        A matplotlib figure, one panel a metric.

    Raises:
        ValueError: If `histories` is something else or empty, a metric is missing in one,
            the runs of a model are of different lengths or epochs, only some of them
            have a metric on validation data, or the models have no metric in common.

    Example:

    >>> import nsl_keras
    >>> figure = nsl_keras.visualize.plot_training_curves({
    ...     "plain": [{"loss": [2.0, 1.0, 0.8]}, {"loss": [2.1, 1.2, 0.7]}],
    ...     "dynamic": [{"loss": [1.9, 0.9, 0.5]}, {"loss": [2.2, 0.8, 0.6]}],
    ... })
    >>> [axis.get_title() for axis in figure.axes]
    ['loss']
    """
    if isinstance(histories, keras.callbacks.History):
        histories = {histories.model.name: histories}
    if not isinstance(histories, Mapping):
        raise ValueError(
            "`histories` must be a History, or histories by the names of models. "
            f"Received: histories={histories!r}"
        )
    models = [_Runs.of(name, given) for name, given in histories.items()]
    if not models:
        raise ValueError(
            "`histories` must hold at least one history. Received: histories={}"
        )
    if isinstance(metrics, str):
        metrics = [metrics]
    if metrics is None:
        metrics = _common_metrics(models)
    missing = [
        f"{metric!r} of {model.name!r}"
        for metric in metrics
        for model in models
        if any(metric not in run for run in model.histories)
    ]
    if missing or not metrics:
        raise ValueError(
            "`metrics` must be names that all histories have. Received: "
            + (f"missing {', '.join(missing)}" if missing else "none in common")
        )
    is_validated = any(model.has(f"val_{metric}") for model in models for metric in metrics)
    figure, axes = _panels(len(metrics), 4.2, 3.2)
    for axis, metric in zip(axes, metrics, strict=True):
        for model, color in zip(models, colors_of(len(models)), strict=True):
            _draw_runs(axis, model, metric, color, "--" if is_validated else "-")
            if model.has(f"val_{metric}"):
                _draw_runs(axis, model, f"val_{metric}", color, "-")
            axis.plot([], [], color=color, label=model.name)
        axis.set_title(metric.replace("_", " "), fontsize=10)
        axis.set_xlabel(x_label, fontsize=9)
        _tidy(axis)
    axes[0].legend(fontsize=8, frameon=False)
    seeds = sorted({len(model.histories) for model in models})
    told = " to ".join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1])))
    figure.suptitle(
        (f"Mean and range of {told} runs" if seeds[-1] > 1 else "One run each")
        + (": solid on validation data, dashed in training" if is_validated else ""),
        fontsize=9,
    )
    return figure


@dataclasses.dataclass(frozen=True)
class _Runs:
    """The runs of one model.

    Attributes:
        name: Name of the model.
        histories: What was measured in each run.
        epochs: Numbers of the epochs, from 1.
    """

    name: str
    histories: list[dict[str, Any]]
    epochs: np.ndarray

    @classmethod
    def of(cls, name: str, given: Any) -> _Runs:
        many = given if isinstance(given, (list, tuple)) else [given]
        histories: list[Any] = [getattr(each, "history", each) for each in many]
        if not histories or not all(isinstance(each, Mapping) for each in histories):
            raise ValueError(
                "`histories` must hold what `fit` returned, or lists of it. Received: "
                f"{type(given).__name__} for {name!r}"
            )
        lengths = {max(map(len, each.values()), default=0) for each in histories}
        if len(lengths) > 1:
            raise ValueError(
                "`histories` must hold runs of the same number of epochs for a model. "
                f"Received: {sorted(lengths)} epochs for {name!r}"
            )
        (count,) = lengths
        counted = list(range(count))
        epochs = [getattr(each, "epoch", counted) for each in many]
        if any(len(each) != count for each in epochs):
            epochs = [counted]  # Some were not counted, as where training was resumed.
        if any(list(each) != list(epochs[0]) for each in epochs):
            raise ValueError(
                "`histories` must hold runs of the same epochs for a model. Received: runs "
                f"from epochs {[each[0] + 1 for each in epochs]} on for {name!r}"
            )
        return cls(name, [dict(each) for each in histories], np.array(epochs[0]) + 1)

    def has(self, key: str) -> bool:
        return any(key in run for run in self.histories)

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Epochs, and values of shape `(runs, epochs)`."""
        lengths = {len(run.get(key, ())) for run in self.histories}
        steps = [self._measured(length) for length in lengths]
        if len(lengths) > 1 or steps[0] is None:
            raise ValueError(
                "`histories` must hold a value for each epoch, or for each n-th one, in "
                f"all runs of a model. Received: {sorted(lengths)} values of {key!r} for "
                f"{len(self.epochs)} epochs of {self.name!r}"
            )
        return steps[0], np.array([run[key] for run in self.histories], "float64")

    def _measured(self, count: int) -> np.ndarray | None:
        """The epochs after which so many values were measured, as by `validation_freq`."""
        # Where several frequencies lead to as many values, the last is close to the end.
        for frequency in range(int(self.epochs.max(initial=0)), 0, -1):
            steps = self.epochs[self.epochs % frequency == 0]
            if len(steps) == count:
                return steps
        return None


def _common_metrics(models: Sequence[_Runs]) -> list[str]:
    return [
        key
        for key in models[0].histories[0]
        if not key.startswith("val_")
        and key not in _NO_METRICS
        and all(key in run for model in models for run in model.histories)
    ]


def _draw_runs(axis: Axes, model: _Runs, metric: str, color: Any, style: str) -> None:
    steps, values = model.curve(metric)
    axis.plot(
        steps,
        values.mean(axis=0),
        style,
        color=color,
        lw=1.8 if style == "-" else 1.1,
        marker="o" if len(steps) == 1 else None,
    )
    if len(values) > 1:
        axis.fill_between(
            steps, values.min(axis=0), values.max(axis=0), color=color, alpha=0.18, lw=0
        )


def plot_costs(
    costs: Mapping[str, Mapping[str, Mapping[float, Any]]],
    y_label: str = "time, as a multiple of the plain layer's",
) -> Figure:
    """Draws what methods cost as sizes grow: a panel for each size, on double-log axes.

    Costs are given, measured on the machine they shall hold for, for example by
    `python -m benchmarks.run --only=costs`, which draws them too.

    Args:
        costs: By what grows (`"batch"`, `"entries"`, `"channels"`), by the method's name,
            and by its size: a number above 0, or three of them, `(median, low, high)`,
            whose interval is drawn as a band.
        y_label: What the numbers are. A grey line marks 1.

    Returns:
        A matplotlib figure, one panel for each size.

    Raises:
        ValueError: If there are no costs, or a size or cost is not a positive number.

    Example:

    >>> import nsl_keras
    >>> figure = nsl_keras.visualize.plot_costs({
    ...     "entries": {"head": {100: (1.2, 1.1, 1.3), 1000: (2.0, 1.9, 2.2)}},
    ...     "batch": {"head": {32: 2.5, 128: 2.0}},
    ... })
    >>> [axis.get_xlabel() for axis in figure.axes]
    ['entries', 'batch']
    """
    checked = {
        size: {name: _intervals(size, name, curve) for name, curve in curves.items()}
        for size, curves in costs.items()
    }
    if not checked or not all(checked.values()):
        raise ValueError(
            "`costs` must hold at least one curve for each size. "
            f"Received: costs of {', '.join(map(repr, checked)) or 'nothing'}"
        )
    names = list(dict.fromkeys(name for curves in checked.values() for name in curves))
    looks = {
        name: (color, MARKERS[number % len(MARKERS)])
        for number, (name, color) in enumerate(
            zip(names, colors_of(len(names)), strict=True)
        )
    }
    figure, axes = _panels(len(checked), 3.6, 3.4)
    for axis, (size, curves) in zip(axes, checked.items(), strict=True):
        axis.axhline(1, color=GREY, lw=1)
        for name, (sizes, medians, lows, highs) in curves.items():
            color, marker = looks[name]
            axis.plot(sizes, medians, color=color, marker=marker, ms=5, lw=1.6)
            axis.fill_between(sizes, lows, highs, color=color, alpha=0.2, lw=0)
        axis.set_xscale("log")
        axis.set_yscale("log")
        ticks = sorted({value for sizes, *_ in curves.values() for value in sizes})
        axis.set_xticks(ticks, _labels_that_fit(ticks), minor=False)
        axis.set_xticks([], minor=True)
        low, high = axis.get_ylim()
        if high < 4 * low:
            # Of the numbers that are written else, 1, 2, 3 and 5, it may hold none.
            axis.set_yticks(_round_numbers(low, high))
            axis.set_yticks([], minor=True)
        axis.yaxis.set_major_formatter("{x:,g}")
        axis.yaxis.set_minor_formatter(_few_digits)
        axis.set_xlabel(size, fontsize=9)
        axis.tick_params(which="both", labelsize=8)
        _tidy(axis)
    axes[0].set_ylabel(y_label, fontsize=9)
    for name, (color, marker) in looks.items():
        axes[0].plot([], [], color=color, marker=marker, ms=5, label=name)
    figure.legend(fontsize=8, frameon=False, loc="outside upper center", ncols=3)
    return figure


def _labels_that_fit(sizes: Sequence[float]) -> list[str]:
    """Labels of sizes on a logarithmic axis, none for one too near the last with one."""
    span = math.log(sizes[-1] / sizes[0]) or 1.0
    labels: list[str] = []
    end = -math.inf
    for size in sizes:
        label = f"{size:,g}"
        place, half = math.log(size / sizes[0]) / span, 0.012 * len(label)
        fits = place - half > end
        labels.append(label if fits else "")
        end = place + half + 0.01 if fits else end
    return labels


def _round_numbers(low: float, high: float) -> list[float]:
    """Some four round numbers between two."""
    from matplotlib.ticker import MaxNLocator

    numbers = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high)
    return [float(number) for number in numbers if low <= number <= high]


def _few_digits(value: float, position: int) -> str:
    """Labels of minor ticks: those at 2, 3 and 5."""
    return f"{value:,g}" if f"{value:e}"[0] in "235" else ""


def _intervals(
    size: str, name: str, curve: Mapping[float, Any]
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Sizes in their order, with medians and the ends of the intervals."""
    sizes = sorted(curve)
    rows = [np.broadcast_to(np.asarray(curve[x], "float64"), (3,)).tolist() for x in sizes]
    numbers = [*sizes, *(value for row in rows for value in row)]
    if not numbers or not all(math.isfinite(value) and value > 0 for value in numbers):
        raise ValueError(
            "`costs` must be numbers above 0. Received: "
            f"{dict(curve)} for {name!r} along {size!r}"
        )
    medians, lows, highs = (list(column) for column in zip(*rows, strict=True))
    return list(sizes), medians, lows, highs


def _panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, in rows of three."""
    columns = min(count, _MOST_COLUMNS)
    rows = math.ceil(count / columns)
    figure = new_figure(figsize=(width * columns, height * rows + 0.3))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def _tidy(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)
    axis.grid(color="#e6e6e6", lw=0.6)
    axis.set_axisbelow(True)
