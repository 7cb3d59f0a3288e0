"""The table of the demo, and its sections of results/README.md."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.svm import SVC

from experiments.common import runs, tables

PLACE = "demo.jsonl"
TITLES = {
    "plain": "CNN",
    "static": "CNN, static neural similarity",
    "dynamic": "CNN, dynamic neural similarity",
    "neighborhoods": "CNN + Meta-Neighborhoods",
    "neighborhoods_film": "CNN + Meta-Neighborhoods + iFiLM",
    "linear": "linear features",
    "linear_longer": "linear features, five times as many epochs",
    "linear_neighborhoods": "linear features + Meta-Neighborhoods",
}
_PIXELS, _SVM = "1 nearest neighbor of the pixels", "SVM, RBF kernel"
_PERCEPTRON = "perceptron, 590 hidden units"
#: Without a network, on the same images, of a seed: `experiments.demo.rivals`.
RIVALS: dict[str, Callable[[int], Any]] = {
    _PIXELS: lambda _: KNeighborsClassifier(1),
    "3 nearest": lambda _: KNeighborsClassifier(3),
    "5 nearest, weighted by distance": lambda _: KNeighborsClassifier(
        5, weights="distance"
    ),
    _SVM: lambda _: SVC(),
    _PERCEPTRON: lambda seed: MLPClassifier(590, max_iter=500, random_state=seed),
}
FAIR = tables.Fair(
    {
        "neighborhoods": ("plain", _PIXELS),
        "linear_neighborhoods": ("linear_longer", _PIXELS, _SVM, _PERCEPTRON),
    },
    TITLES,
)


def table(found: list[dict], rivals: Sequence[dict] = ()) -> str:
    """One line a model: means and deviations over seeds, paired differences to its twin."""
    columns = ["model", "test accuracy, %", "difference to its twin", "before adaptation"]
    rows = []
    for name, title in TITLES.items():
        chosen = tables.of_method(found, name)
        if not chosen:
            continue
        accuracies = tables.percent(found, name, "test_accuracy")
        baseline = "linear" if name.startswith("linear") else "plain"
        twin = tables.percent(found, baseline, "test_accuracy")
        tables.require_comparable(chosen, tables.of_method(found, baseline))
        ratio = next((r["step_time_ratio"] for r in chosen if "step_time_ratio" in r), None)
        rows.append(
            [
                title,
                tables.mean(accuracies.values()),
                "" if name == baseline else tables.difference(accuracies, twin),
                tables.mean_percent(found, name, "test_unadapted_accuracy"),
                f"{chosen[0]['parameters']:,}",
                "" if ratio is None else f"{ratio['median']:.2f}x",
            ]
        )
    for name in RIVALS:
        accuracies = tables.percent([*rivals], name, "test_accuracy").values()
        same = len({*accuracies}) == 1  # No random numbers.
        shown = tables.mean([*accuracies][:1] if same else accuracies)
        rows.append([name, shown or tables.NOT_RUN])
    return tables.run_and_not_run([*columns, "parameters", "step time"], rows)


def section(results: pathlib.Path, dataset: str) -> str:
    records = runs.RunRecords(results / PLACE, dataset)
    found, setting = records.runs, records.setting
    rivals = runs.RunRecords(results / PLACE, f"{dataset}_rivals").runs
    served = next(run["served"] for run in found if "served" in run)
    parts = [
        f"## Demo: {dataset}",
        f"{tables.commands(found + rivals)}: {setting['train_examples']:,} training "
        f"images, {setting['epochs']} epochs, {setting['test_examples']:,} test images, "
        f"seeds {tables.seeds(found)}; mean ± standard deviation, differences "
        "paired by seed.",
        table(found, rivals),
        f"Served without nsl_keras: {served['agreeing_predictions']} of "
        f"{served['test_images']} predictions agree, logits to "
        f"{served['largest_logit_difference']:.1e}.",
    ]
    return "\n\n".join(parts)
