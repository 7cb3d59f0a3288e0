"""The few-shot table from runs, beside the paper's Table 6 and the rebuttal's Table 1."""

from __future__ import annotations

import json
import pathlib
import statistics

import numpy as np

from examples import few_shot_methods
from nsl_keras import few_shot


def section(path: pathlib.Path) -> str:
    """Markdown of a results file of `examples.few_shot`: its setting, and its table."""
    content = json.loads(path.read_text())
    setting, runs = content["setting"], content["runs"]
    commands = dict.fromkeys(f"`{run['command']}`" for run in runs)
    title = (
        f"### {setting['ways']}-way {setting['shots']}-shot {setting['dataset']}, "
        f"{setting['backbone'].upper().replace('CNN', 'CNN-')}"
        f"{', the rate chosen on validation classes' if len(setting['rates']) > 1 else ''}"
    )
    rates = ", ".join(f"{rate:g}" for rate in setting["rates"])
    chosen = (
        f"at {rates}"
        if len(setting["rates"]) == 1
        else f"at the best of {rates} on {setting['validation_episodes']} episodes of the "
        f"validation classes, after {100 * setting['trial_share']:g} % of the training"
    )
    text = (
        f"{'; '.join(commands)}. {setting['train_classes']:,} classes for training, "
        f"{setting['validation_classes']} for validation (the paper trains on both), "
        f"{setting['test_classes']} for the test: {setting['test_episodes']} episodes with "
        f"{setting['queries']} queries a class, the same for all. Adam {chosen}, decayed "
        f"to 0 along a cosine; ProtoNet is trained with {setting['proto_ways']} ways. "
        f"About {setting['training_images']:,} training images a method. Accuracies in %: "
        "mean over seeds and episodes ± half the width of the 95 % interval over episodes; "
        "differences are paired episode by episode. The published figures are for "
        "Mini-ImageNet, 5-way 5-shot."
    )
    return f"{title}\n\n{text}\n\n{_table(setting, runs)}"


def not_run() -> str:
    """Markdown of the published figures, where nothing ran."""
    lines = [
        "The published accuracies on Mini-ImageNet, 5-way 5-shot, in %.",
        "",
        "| method | Table 6, CNN-4 | CNN-9 | rebuttal, Table 1, CNN-4 | CNN-9 | here |",
        f"|{'---|' * 6}",
    ]
    for method in few_shot_methods.METHODS.values():
        cells = [
            source.get(backbone, "")
            for source in (method.paper, method.rebuttal)
            for backbone in ("cnn4", "cnn9")
        ]
        lines.append(f"| {' | '.join([method.title, *cells, 'not run'])} |")
    return "\n".join(lines)


def _table(setting: dict, runs: list[dict]) -> str:
    columns = [
        "method",
        "Table 6",
        "rebuttal, Table 1",
        "here",
        "difference to finetuning",
        "seeds",
        "batch norm",
        "rate",
        "training images",
        "training, s",
        "test, s",
    ]
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for name, method in few_shot_methods.METHODS.items():
        published = [
            source.get(setting["backbone"], "")
            for source in (method.paper, method.rebuttal)
        ]
        mine = sorted(
            (run for run in runs if run["method"] == name), key=lambda run: run["seed"]
        )
        if not mine:
            cells = [method.title, *published, "not run", *[""] * (len(columns) - 4)]
        else:
            found = _evaluation(mine, setting)
            cells = [
                method.title,
                *published,
                f"{100 * found.mean:.2f} ± {100 * found.half_width:.2f}",
                _difference(mine, runs, setting),
                ", ".join(str(run["seed"]) for run in mine),
                mine[0]["batch_normalization"] or "none",
                ", ".join(dict.fromkeys(f"{run['learning_rate']:g}" for run in mine)),
                f"{mine[0]['training_images']:,}",
                _median(mine, "seconds"),
                _median(mine, "evaluation_seconds"),
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _evaluation(runs: list[dict], setting: dict) -> few_shot.Evaluation:
    """Accuracy of a method in each episode, the mean over the seeds of its runs."""
    queries = setting["ways"] * setting["queries"]
    right = [run["right_queries"] for run in runs]
    return few_shot.Evaluation(np.mean(right, axis=0) / queries)


def _difference(mine: list[dict], runs: list[dict], setting: dict) -> str:
    """Difference to the baseline, over the seeds that both were trained with."""
    baseline = [run for run in runs if run["method"] == few_shot_methods.BASELINE]
    both = {run["seed"] for run in mine} & {run["seed"] for run in baseline}
    if not both or mine[0]["method"] == few_shot_methods.BASELINE:
        return ""
    paired = few_shot.compare(
        *(
            _evaluation([run for run in each if run["seed"] in both], setting)
            for each in (mine, baseline)
        )
    )
    return f"{100 * paired.mean:+.2f} ± {100 * paired.half_width:.2f}"


def _median(runs: list[dict], key: str) -> str:
    return f"{statistics.median(run[key] for run in runs):,.0f}"
