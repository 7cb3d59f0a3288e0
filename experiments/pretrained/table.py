"""What was gained on a pretrained network, from the records of its runs."""

import pathlib
from collections.abc import Mapping

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
    if name == BASELINE:
        return tables.mean(own.values(), over="draws")
    if tables.incomparable(*pair):
        return tables.NOT_COMPARABLE
    return tables.difference(own, baseline, "draws") or tables.NOT_RUN


TEXT = "text.jsonl"
TEXTS = {"banking77": "BANKING77", "clinc150": "CLINC150"}


def text(results: pathlib.Path) -> str:
    found = runs.RunRecords(results / TEXT).runs
    if not found:
        return "### A small transformer with few labels\n\nNot run: `experiments.text`."
    setting = found[0]["setting"]
    largest = max(run.get("folded_difference", 0.0) for run in found)
    return (
        f"### A small transformer with few labels\n\n{tables.commands(found)}: MiniLM-L6, "
        f"{setting['classes'] or 'all'} classes. Test accuracy of the {BASELINE} on the "
        "embeddings in %, and what other methods, which start from it, have above it, "
        "paired by draw; mean ± standard deviation over draws, or over draws and data "
        f"sets. Learning rates are the best of {setting['trials']} other draws of "
        "BANKING77. Logits of folded networks differ by at most "
        f"{largest:.0e}.\n\n{table(found, TEXTS)}"
    )


RECIPE = "readme.jsonl"
TRIED_PHOTOGRAPHS = ("photo", "blur", "noise")
PHOTOGRAPHS = (*TRIED_PHOTOGRAPHS, *CORRUPTED)
STEPS = {
    "regression": "logistic regression on the features",
    "adapt": "`Finetuner.adapt`",
    "head": "its classifier alone, trained as long",
    "similarity": "`add_similarity`, trained and folded",
}
FAIR = tables.Fair(
    {
        "similarity": ("regression", "head"),
        "M unconstrained + head": ("everything",),
        "neighbors": (BASELINE, "nearest centroid"),
    },
    STEPS,
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


def recipe(results: pathlib.Path) -> str:
    found = runs.RunRecords(results / RECIPE).runs

    def cell(own: list[dict], step: str) -> str:
        base = int(step != "regression")
        found = (each["accuracy"] for each in own)
        gains = (100 * (each[step] - base * each["regression"]) for each in found)
        return tables.mean(gains, over="draws")

    rows = []
    for place in (*PHOTOGRAPHS, "mean"):
        own = [each for each in found if place in (each["domain"], "mean")]
        rows.append([place, *(cell(own, step) for step in STEPS), str(len(own))])
    columns = ["photographs", *STEPS.values(), "draws"]
    return (
        f"### README's recipe\n\n{tables.commands(found)}: EfficientNet-Lite0 and "
        f"five labels per class. Test accuracy of the first column in %, and what each "
        "step of the recipe has above it, paired by draw; mean ± standard deviation over "
        f"draws.\n\n{tables.markdown(columns, rows)}"
    )
