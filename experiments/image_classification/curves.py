"""Figures 7 and 8 of Meta-Neighborhoods, from records."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.common import tables


def in_training(_setting: dict, found: list[dict], titles: dict[str, str]) -> Any:
    """Figure 7: accuracies on validation images in training; `None` if no run has them."""
    import matplotlib.pyplot as plt

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
    import matplotlib.pyplot as plt

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
