"""Curves: how twins train, and what a method costs."""

from __future__ import annotations

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
    metrics: Sequence[str] | None = None,
    x_label: str = "epoch",
) -> Figure:
    """Draws how models train side by side: the mean of several seeds, and their spread.

    Each panel is a metric, each colour a model. The solid line is the metric on validation
    data, where there are any, and the dashed one on training data; each is the mean over
    the model's runs, and the band reaches from the lowest run to the highest.

    Args:
        histories: What `fit` returned (`keras.callbacks.History`, or its `history` dict)
            by the model's name; a list of them, one a seed, for a spread. A single
            `History` stands for itself, by the name of its model.
        metrics: Names of the metrics, without `val_`; `None` takes all that the models
            have in common.
        x_label: What an entry of a history is.

    Returns:
        A matplotlib figure, one panel a metric.

    Raises:
        ValueError: If `histories` is something else or empty, a metric is missing in one,
            the runs of a model are of different lengths, or the models have no metric in
            common.

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
    runs = {name: _runs_of(name, given) for name, given in histories.items()}
    if not runs:
        raise ValueError(
            "`histories` must hold at least one history. Received: histories={}"
        )
    if metrics is None:
        metrics = _common_metrics(runs)
    missing = [
        f"{metric!r} of {name!r}"
        for metric in metrics
        for name, of_model in runs.items()
        if any(metric not in run for run in of_model)
    ]
    if missing or not metrics:
        raise ValueError(
            "`metrics` must be names that all histories have. Received: "
            + (f"missing {', '.join(missing)}" if missing else "none in common")
        )
    figure, axes = _panels(len(metrics), 4.2, 3.2)
    for axis, metric in zip(axes, metrics, strict=True):
        for (name, of_model), color in zip(runs.items(), colors_of(len(runs)), strict=True):
            validated = f"val_{metric}" in of_model[0]
            _draw_runs(axis, of_model, metric, color, "--" if validated else "-")
            if validated:
                _draw_runs(axis, of_model, f"val_{metric}", color, "-")
            axis.plot([], [], color=color, label=name)
        axis.set_title(metric.replace("_", " "), fontsize=10)
        axis.set_xlabel(x_label, fontsize=9)
        _tidy(axis)
    axes[0].legend(fontsize=8, frameon=False)
    seeds = sorted({len(of_model) for of_model in runs.values()})
    told = " to ".join(str(count) for count in dict.fromkeys((seeds[0], seeds[-1])))
    is_validated = any(key.startswith("val_") for run in runs.values() for key in run[0])
    figure.suptitle(
        (f"Mean and range of {told} runs" if seeds[-1] > 1 else "One run each")
        + (": solid on validation data, dashed in training" if is_validated else ""),
        fontsize=9,
    )
    return figure


def _runs_of(name: str, given: Any) -> list[dict[str, Any]]:
    """The histories of one model, as dicts."""
    many = given if isinstance(given, (list, tuple)) else [given]
    runs: list[Any] = [getattr(each, "history", each) for each in many]
    if not runs or not all(isinstance(run, Mapping) for run in runs):
        raise ValueError(
            "`histories` must hold what `fit` returned, or lists of it. Received: "
            f"{type(given).__name__} for {name!r}"
        )
    lengths = {len(values) for run in runs for values in run.values()}
    if len(lengths) > 1:
        raise ValueError(
            "`histories` must hold runs of the same number of epochs for a model. "
            f"Received: {sorted(lengths)} epochs for {name!r}"
        )
    return [dict(run) for run in runs]


def _common_metrics(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    first = next(iter(runs.values()))[0]
    return [
        key
        for key in first
        if not key.startswith("val_")
        and key not in _NO_METRICS
        and all(key in run for of_model in runs.values() for run in of_model)
    ]


def _draw_runs(
    axis: Axes,
    runs: Sequence[Mapping[str, Any]],
    metric: str,
    color: Any,
    style: str,
) -> None:
    values = np.array([run[metric] for run in runs], "float64")
    steps = np.arange(1, values.shape[1] + 1)
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
        axis.set_xticks(ticks, [f"{value:,g}" for value in ticks], minor=False)
        axis.set_xticks([], minor=True)
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
