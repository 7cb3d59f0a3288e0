"""What was gained on a pretrained network, from the records of its runs."""

import pathlib
import statistics
from collections.abc import Mapping, Sequence

from experiments.common import runs, tables

PLACE = "pretrained.jsonl"
BASELINE = "logistic regression"
#: Domains that learning rates were chosen on, with other images.
TRIED = {"sketch": "sketches", "noise": "noisy photos", "blur": "blurred photos"}
CORRUPTED = {
    "jpeg": "JPEG of quality 7",
    "mosaic": "mosaic of 24x24",
    "motion": "motion blur of 11 pixels",
    "contrast": "contrast of 0.2",
    "salt": "16 % salt and pepper",
}
DOMAINS = TRIED | CORRUPTED


def table(found: list[dict], domains: Mapping[str, str] = TRIED) -> str:
    """A line a method: the first has accuracies, the others what is above them."""
    found = [run for run in found if run["domain"] in domains]
    parts: dict[str, list[dict]] = {}
    for shots in sorted({run["shots"] for run in found}):
        own = [run for run in found if run["shots"] == shots]
        parts[f"mean, {shots} a class"] = own
        for domain, title in domains.items():
            if here := [run for run in own if run["domain"] == domain]:
                parts[f"{title}, {shots} a class"] = here
    rows = []
    for name in dict.fromkeys(run["method"] for run in found):
        own = tables.of_method(found, name)
        trained = own[0].get("trained")
        rows.append(
            [
                f"{name}{tables.star(own)}",
                *(cell(part, name) for part in parts.values()),
                f"{trained:,}" if trained else "",
                # In float32.
                f"{4 * trained / 1000:,.0f}" if trained else "",
                tables.rates(own),
                tables.seeds(own),
            ]
        )
    columns = ["method", *parts, "trained parameters", "kB of a task"]
    return tables.markdown([*columns, "learning rate", "draws"], rows)


def cell(found: list[dict], name: str) -> str:
    """The baseline's accuracies, or what a method has above them, paired by draw."""
    pair = [tables.of_method(found, each) for each in (name, BASELINE)]
    own, baseline = (
        {(run["domain"], run["seed"]): 100 * run["accuracy"] for run in each}
        for each in pair
    )
    is_one = len({run["domain"] for run in found}) == 1
    over = "draws" if is_one else "draws of domains"
    if name == BASELINE:
        return tables.mean(own.values(), over=over)
    if tables.incomparable(*pair):
        return tables.NOT_COMPARABLE
    return tables.difference(own, baseline, over) or tables.NOT_RUN


TEXT = "text.jsonl"
TEXTS = {"banking77": "BANKING77", "clinc150": "CLINC150"}


def text(results: pathlib.Path) -> str:
    found = runs.RunRecords(results / TEXT).runs
    setting = found[0]["setting"]
    largest = max(run.get("folded_difference", 0.0) for run in found)
    return (
        f"### A small transformer with few labels\n\n{tables.commands(found)}: MiniLM-L6, "
        f"{setting['classes'] or 'all'} classes. Test accuracy of the {BASELINE} on the "
        "embeddings in %, and what other methods, which start from it, have above it, "
        "paired by draw; mean ± standard deviation over draws, or over draws and data "
        f"sets. Learning rates are the best of {setting['trials']} other draws of "
        "BANKING77. Logits of folded networks differ by at most "
        f"{largest:.1g}.\n\n{table(found, TEXTS)}"
    )


RECIPE = "readme.jsonl"
TRIED_PHOTOGRAPHS = ("photo", "blur", "noise")
PHOTOGRAPHS = (*TRIED_PHOTOGRAPHS, *CORRUPTED)
CORRUPTIONS = PHOTOGRAPHS[1:]
STEPS = {
    "regression": "logistic regression on the features",
    "adapt": "`Finetuner.adapt`",
    "head": "then its classifier alone, trained as long",
    "LoRA of rank 1 + head": "then Keras's LoRA of rank 1 and the classifier",
    "everything": "then all weights",
    "similarity": "then a similarity `M` and the classifier, folded",
}
FAIR = tables.Fair(
    {
        "M unconstrained + head": ("everything",),
        "neighbors": (BASELINE, "nearest centroid"),
    }
)
FAIR_RECIPE = tables.Fair(
    {"similarity": ("regression", "head", "LoRA of rank 1 + head", "everything")}, STEPS
)

PARTS = {
    "tried": ("## A pretrained network with few labels", TRIED),
    "corrupted": ("### Five corruptions of photographs", CORRUPTED),
}


def section(results: pathlib.Path, kind: str = "tried") -> str:
    title, domains = PARTS[kind]
    found = runs.RunRecords(results / PLACE).runs
    found = [run for run in found if run["domain"] in domains]
    largest = max((run.get("folded_difference", 0.0) for run in found), default=0.0)
    return (
        f"{title}\n\n{tables.commands(found)}: EfficientNet-Lite0 (ImageNet) on the seven "
        f"classes of PACS at {found[0]['setting']['image_size']} pixels. Test accuracy of "
        f"the {BASELINE} on the features in %, and what other methods have above it, "
        "paired by draw; mean ± standard deviation over draws, or over draws and domains. "
        "Methods that change the backbone start from it. Logits of folded networks differ "
        f"by at most {largest:.1g}.\n\n{table(found, domains)}"
    )


def accuracies(results: pathlib.Path) -> dict[str, dict[tuple[str, int], float]]:
    """Of each step of the recipe and of its rivals, in %, by domain and draw."""
    found: dict[str, dict[tuple[str, int], float]] = {name: {} for name in STEPS}
    for name in ("rivals", ""):  # The recipe's own `head` was not tuned.
        for run in runs.RunRecords(results / RECIPE, name).runs:
            own = {run["method"]: run["accuracy"]} if name else run["accuracy"]
            for step, share in own.items():
                found[step].setdefault((run["domain"], run["seed"]), 100 * share)
    complete = set.intersection(*map(set, found.values()))
    draws = {n for _, n in complete if complete.issuperset((p, n) for p in PHOTOGRAPHS)}
    return {
        name: {key: value for key, value in each.items() if key[1] in draws}
        for name, each in found.items()
    }


def gain(found: dict, step: str, domains: Sequence[str]) -> str:
    """The accuracies of the baseline, or what a step has above them, by draw."""
    own, base = (
        {
            draw: statistics.mean(found[name][domain, draw] for domain in domains)
            for _, draw in found[name]
        }
        for name in (step, "regression")
    )
    if step == "regression":
        return tables.mean(own.values(), over="draws")
    return tables.difference(own, base, "draws")


def kilobytes(results: pathlib.Path) -> dict[str, str]:
    """Of what each step trains, in float32."""
    rivals = runs.RunRecords(results / RECIPE, "rivals").runs
    trained = {run["method"]: run["trained"] for run in rivals}
    own = {run["trained"] for run in runs.RunRecords(results / RECIPE).runs}
    trained |= {"similarity": max(own)}
    trained |= dict.fromkeys(("regression", "adapt"), trained["head"])
    return {name: f"{4 * each / 1000:,.0f}" for name, each in trained.items()}


def recipe(results: pathlib.Path) -> str:
    found, sizes = accuracies(results), kilobytes(results)
    tuned = runs.RunRecords(results / RECIPE, "rivals").runs
    rows = [
        [
            f"{title}{tables.star(tables.of_method(tuned, step))}",
            gain(found, step, CORRUPTIONS),
            *(gain(found, step, [domain]) for domain in PHOTOGRAPHS),
            sizes[step],
            tables.rates(tables.of_method(tuned, step)),
        ]
        for step, title in STEPS.items()
    ]
    columns = ["", "seven corruptions", *PHOTOGRAPHS, "kB of a task", "learning rate"]
    made = runs.RunRecords(results / RECIPE).runs + tuned
    return (
        f"### README's recipe\n\n{tables.commands(made)}: EfficientNet-Lite0 and "
        "five labels per class. Test accuracy of the first row in %, and what each other "
        "row has above it, paired by draw. The rates of the rivals are the best of another "
        "draw of clean, blurred and noisy photographs; nothing else is tuned.\n\n"
        f"{tables.markdown(columns, rows)}"
    )
