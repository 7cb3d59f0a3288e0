"""The few-shot table from runs, beside the paper's Table 6 and the rebuttal's Table 1."""

from collections.abc import Mapping

import numpy as np

from experiments.common import runs, tables
from experiments.few_shot import methods

#: What the published figures are for: Mini-ImageNet, whose classes anyone can count.
PUBLISHED = {
    "dataset": "mini_imagenet",
    "ways": 5,
    "shots": 5,
    "train_classes": 64,
    "validation_classes": 16,
    "test_classes": 20,
}
_SOURCES = methods.TABLE_6, methods.REBUTTAL
PLACE = "few_shot.jsonl"
TITLE = "## Neural Similarity Learning, Table 6: few-shot learning"


FAIR = tables.Fair(
    {
        "dynamic_nsn": ("finetuning", "same_parameters", "longer"),
        "neighborhoods": ("finetuning", "nearest_neighbor"),
        **{f"{name}_dynamic": (name,) for name in ("proto_net", "relation_net", "maml")},
    },
    {name: method.title for name, method in methods.METHODS.items()},
)
#: Every row beside the finetuned classifier, learners beside themselves with dynamic
#: networks, and adapted similarities.
ALL = dict.fromkeys(methods.METHODS, methods.BASELINE)
DYNAMIC = {
    name: dict(methods.PAIRS).get(name, name)
    for learner in ("proto_net", "relation_net")
    for name in (learner, f"{learner}_dynamic")
}
ADAPTED = {
    name: dict(methods.PAIRS).get(name, methods.BASELINE)
    for name in (
        *("finetuning", "static_nsn", *methods.ADAPTED),
        *("meta_static_published", "meta_static_nsn"),
    )
}


def section(records: runs.RunRecords, names: Mapping[str, str] = ALL) -> str:
    """Markdown of a setting's runs, and a table: rows, each beside another one."""
    setting, found = records.setting, records.runs
    tuned = len(setting["rates"]) > 1
    title = (
        f"### {setting['ways']}-way {setting['shots']}-shot {setting['dataset']}, "
        f"{setting['backbone'].upper().replace('CNN', 'CNN-')}"
        f"{' of Table 7' if setting.get('variant') else ''}"
        f"{', the rate chosen on validation classes' if tuned else ''}"
    )
    rates = ", ".join(f"{rate:g}" for rate in setting["rates"])
    chosen = (
        f"at the best of {rates} on {setting['validation_episodes']} episodes of the "
        f"validation classes, after {100 * setting['trial_share']:g} % of the training"
        if tuned
        else f"at {rates}"
    )
    both = "the authors train theirs on both, but for MAML"
    decay = "decayed to 0 along a cosine"
    if setting.get("published"):
        both, decay = "all but MAML trained on both", "constant"
    augmented = "Images are shifted by up to 4 pixels and mirrored in pretraining. "
    text = (
        f"{tables.commands(found)}. {setting['train_classes']:,} classes for training, "
        f"{setting['validation_classes']} for validation ({both}), "
        f"{setting['test_classes']} for the test: {setting['test_episodes']} episodes with "
        f"{setting['queries']} queries a class, the same for all. Adam {chosen}, {decay}; "
        f"ProtoNet is trained with {setting['proto_ways']} ways. "
        f"About {setting['training_images']:,} training images a method. "
        f"{augmented if setting['augmentation'] else ''}{_backends(found)}Accuracies in %, "
        "each the mean over episodes: by seed, or the mean over three seeds."
    )
    trials = tables.trials_of(records)
    parts = [title, text, _table(setting, found, names, trials)]
    pairs = [
        f"{methods.METHODS[first].title} less {methods.METHODS[second].title} {difference}"
        for first, second in methods.PAIRS
        if (difference := _difference(first, second, found, setting, trials))
    ]
    if pairs:
        parts.append(f"Paired differences: {'; '.join(pairs)}.")
    return "\n\n".join(parts)


def _backends(found: list[dict]) -> str:
    """Which rows were not run on TensorFlow, as the others were."""
    others = {
        run["method"]: run["versions"]["backend"]
        for run in found
        if not run["versions"]["backend"].startswith("tensorflow")
    }
    titles = "; ".join(methods.METHODS[name].title for name in others)
    return f"With {', '.join(dict.fromkeys(others.values()))}: {titles}. " if others else ""


def _table(
    setting: dict, found: list[dict], names: Mapping[str, str], trials: tables.Trials
) -> str:
    published = all(setting[name] == value for name, value in PUBLISHED.items())
    columns = ["method", *(["Table 6", "rebuttal, Table 1"] if published else [])]
    difference = "difference to finetuning" if names is ALL else "difference"
    columns += ["accuracy, %", difference, "seeds", "batch norm", "rate"]
    columns += ["support loss", "training images"]
    rows = []
    for name, other in names.items():
        method = methods.METHODS[name]
        cells = [method.title]
        if published:
            place = ("cnn4", "cnn9").index(setting["backbone"])
            cells += [source.get(name, ("", ""))[place] for source in _SOURCES]
        chosen = tables.of_method(found, name)
        cells[0] += tables.star(chosen, trials)
        if not chosen:
            if any(name in source for source in _SOURCES):
                rows.append([*cells, tables.NOT_RUN])
            continue
        if diverged := sum("diverged" in run for run in chosen):
            rows.append([*cells, f"diverged in {diverged} of {len(chosen)} runs"])
            continue
        shown = _difference(name, other, found, setting, trials)
        if shown and names is not ALL:
            baseline = other == methods.BASELINE
            title = "finetuning" if baseline else methods.METHODS[other].title
            shown += f" to {title}"
        cells += [
            tables.mean_percent(chosen, name, "accuracy"),
            shown,
            tables.seeds(chosen),
            chosen[0]["batch_normalization"] or "none",
            ", ".join(dict.fromkeys(map(_rate, chosen))),
            _support_loss(chosen),
            f"{chosen[0]['training_images']:,}",
        ]
        rows.append(cells)
    return tables.run_and_not_run(columns, rows)


def _rate(run: dict) -> str:
    inner = f", inner {run['inner_rate']:g}" if "inner_rate" in run else ""
    return f"{run['learning_rate']:g}{inner}"


def _support_loss(found: list[dict]) -> str:
    losses = [run["support_losses"] for run in found if "support_losses" in run]
    if not losses:
        return ""
    before, after = np.mean(losses, axis=0)
    return f"{before:.2f} to {after:.2f}"


def _difference(
    first: str, second: str, found: list[dict], setting: dict, trials: tables.Trials
) -> str:
    """Difference of two methods, over the seeds that both were trained with."""
    finished = [run for run in found if "diverged" not in run]
    pair = [tables.of_method(finished, name) for name in (first, second)]
    shown = tables.difference(
        *(tables.percent(finished, name, "accuracy") for name in (first, second))
    )
    if first == second or not shown:
        return ""
    reason = tables.incomparable(*pair, trials, chance=1 / setting["ways"])
    return tables.NOT_COMPARABLE if reason else shown
