"""Figures 7 and 8 of Meta-Neighborhoods, from records."""

from __future__ import annotations

from typing import Any

import numpy as np


def in_training(setting: dict, found: list[dict], titles: dict[str, str]) -> Any:
    """Figure 7: accuracies on validation images along the way, means over seeds."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for method, title in titles.items():
        own = (run for run in found if run["method"] == method)
        curves = [run["validation_curve"] for run in own if "validation_curve" in run]
        if curves:
            steps, accuracies = np.mean(curves, axis=0).T
            axis.plot(steps, 100 * accuracies, label=f"{title}, {len(curves)} seeds")
    axis.set_xlabel("steps")
    axis.set_ylabel("validation accuracy, %")
    axis.legend()
    return figure


def by_dictionary(setting: dict, found: list[dict], titles: dict[str, str]) -> Any:
    """Figure 8: accuracies by the number of entries, and by the inverse temperature."""
    import matplotlib.pyplot as plt

    dictionary = setting["dictionary"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    for axis, kind, name, unit in (
        (axes[0], "size", "entries, S", dictionary["num_neighbors"]),
        (axes[1], "peak", "1/T", 1 / dictionary["temperature"]),
    ):
        points: dict[float, list[float]] = {}
        for run in found:
            method, _, factor = run["method"].partition(f"_{kind}_")
            if method == "neighborhoods":
                value = unit * float(factor or 1)
                points.setdefault(value, []).append(100 * run["test_accuracy"])
        values = sorted(points)
        axis.plot(values, [np.mean(points[value]) for value in values], "o-", label="MN")
        plain = [100 * run["test_accuracy"] for run in found if run["method"] == "plain"]
        if plain:
            axis.axhline(np.mean(plain), color="black", linestyle=":", label="vanilla")
        axis.set_xscale("log")
        axis.set_xlabel(name)
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend()
    return figure
