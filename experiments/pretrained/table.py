"""What was gained on a pretrained network, from the records of its runs."""

from __future__ import annotations

import pathlib

from experiments.common import runs, tables

PLACE = "pretrained.jsonl"
BASELINE = "logistic regression"
DOMAINS = {"sketch": "sketches", "noise": "noisy photos", "blur": "blurred photos"}


def table(found: list[dict]) -> str:
    """A line a method: the first has accuracies, the others what is above them."""
    places = sorted({(run["shots"], run["domain"]) for run in found})
    rows = []
    for name in dict.fromkeys(run["method"] for run in found):
        own, cells = tables.of_method(found, name), []
        for place in places:
            here = [run for run in found if (run["shots"], run["domain"]) == place]
            values = tables.percent(here, name, "accuracy")
            if name == BASELINE:
                cells.append(tables.mean(values.values()))
            else:
                baseline = tables.percent(here, BASELINE, "accuracy")
                cells.append(tables.difference(values, baseline) or "not run")
        trained = own[0].get("trained")
        rates = "" if not own[0]["rate"] else f"{own[0]['rate']:g}"
        cells += [f"{trained:,}" if trained else "", rates]
        cells.append(", ".join(map(str, sorted({run["seed"] for run in own}))))
        rows.append([name, *cells])
    titles = [f"{DOMAINS[domain]}, {shots} a class" for shots, domain in places]
    columns = ["method", *titles, "trained numbers", "rate", "draws"]
    return tables.markdown(columns, rows)


def section(results: pathlib.Path) -> str:
    """The section of results/README.md."""
    title = "## A pretrained network with few labels"
    found = runs.RunRecords(results / PLACE).runs
    if not found:
        return f"{title}\n\nNot run."
    largest = max((run.get("folded_difference", 0.0) for run in found), default=0.0)
    return (
        f"{title}\n\n{tables.commands(found)}: EfficientNet-Lite0 (ImageNet) on the seven "
        f"classes of PACS at {found[0]['setting']['image_size']} pixels. Test accuracy of "
        f"the {BASELINE} on the features in %, and what other methods have above it, "
        "paired by draw; mean ± standard deviation over draws. Methods that change the "
        "backbone start from it. Logits of folded networks differ by at most "
        f"{largest:.1g}.\n\n{table(found)}"
    )
