"""Table 1 and Appendix A of Meta-Neighborhoods from runs, beside the paper's figures."""

from __future__ import annotations

import json
import pathlib
import statistics

from examples import neighborhood_methods, run_records

EXPERIMENTS = neighborhood_methods.EXPERIMENTS
BASELINE = neighborhood_methods.BASELINE


def section(path: pathlib.Path, experiments: list[str] | None = None) -> str:
    """Markdown of a results file: its setting, and the experiments it has runs of.

    Args:
        path: A file that `examples.image_classification` wrote.
        experiments: Their names; `None` is all with a run of their own.
    """
    content = json.loads(path.read_text())
    setting, runs = content["setting"], content["runs"]
    return "\n\n".join(
        [
            _heading(setting, runs),
            *(
                _table(EXPERIMENTS[name], setting, runs)
                for name in (experiments or experiments_of(path))
            ),
        ]
    )


def experiments_of(path: pathlib.Path) -> list[str]:
    """Names of the experiments of which a results file has more than Table 1 has."""
    ran = {run["method"] for run in json.loads(path.read_text())["runs"]}
    coarse = "_coarse_" in path.name
    in_table_1 = set() if coarse else set(EXPERIMENTS["table_1"].names)
    return [
        name
        for name, experiment in EXPERIMENTS.items()
        if experiment.coarse == coarse
        and ran & set(experiment.names) - (in_table_1 if name != "table_1" else set())
    ]


def not_run(paths: list[pathlib.Path]) -> str:
    """Markdown of what no file holds: the paper's figures alone."""
    ran = {name for path in paths for name in experiments_of(path)}
    settings = [json.loads(path.read_text())["setting"] for path in paths]
    seen = {(setting["backbone"], setting["dataset"]) for setting in settings}
    parts = []
    published = {
        where: figures
        for where, figures in EXPERIMENTS["table_1"].published.items()
        if where not in seen
    }
    names = ("plain", "maxl", "plain_film", "neighborhoods", "neighborhoods_film")
    parts.append(_published_table("Table 1. Accuracies, %", published, names))
    rest = [name for name in ("A.5", "A.6") if name not in ran]
    if rest:
        names = tuple(dict.fromkeys(n for name in rest for n in EXPERIMENTS[name].names))
        title = f"Table 3 (Appendices {' and '.join(rest)}). Accuracies, %"
        parts.append(_published_table(title, EXPERIMENTS["A.5"].published, names))
    others = [name for name in ("A.3", "A.4", "A.9") if name not in ran]
    parts += [f"{EXPERIMENTS[name].title}: not run. {_note(name)}" for name in others]
    return "\n\n".join(["### Not run", *parts])


def _note(name: str) -> str:
    return EXPERIMENTS[name].note


def _title(name: str) -> str:
    return "MAXL" if name == "maxl" else neighborhood_methods.METHODS[name].title


def _published_table(title: str, published: dict, names: tuple[str, ...]) -> str:
    lines = [
        title,
        "",
        f"| backbone | data set | {' | '.join(map(_title, names))} | here |",
        f"|{'---|' * (len(names) + 3)}",
    ]
    for (backbone, dataset), figures in published.items():
        cells = [f"{figures[name]:.2f}" for name in names]
        lines.append(f"| {backbone} | {dataset} | {' | '.join(cells)} | not run |")
    return "\n".join(lines)


def _heading(setting: dict, runs: list[dict]) -> str:
    recipe = setting["recipe"]
    drops = ", ".join(f"{drop:,}" for drop in recipe["rate_drops"])
    commands = dict.fromkeys(f"`{run['command']}`" for run in runs)
    return (
        f"### {setting['backbone']} on {setting['dataset']}, {setting['classes']} classes: "
        f"{setting['train_examples']:,} images, {recipe['iterations']:,} iterations\n\n"
        f"{'; '.join(commands)}. AdamW at {recipe['learning_rate']:g}, divided by 10 at "
        f"{drops}; batches of {recipe['batch_size']}, augmentation "
        f"{recipe['augmentation']}; {recipe['num_neighbors']:,} entries, T = "
        f"{recipe['temperature']:g}. Accuracies on {setting['test_examples']:,} test "
        "images after the last step, in %, mean ± standard deviation over seeds; "
        "differences paired by seed."
    )


def _table(experiment: neighborhood_methods.Experiment, setting: dict, runs: list) -> str:
    where = setting["backbone"], setting["dataset"]
    published = experiment.published.get(where, {})
    columns = ["method"]
    if published:
        columns.append("paper")
    columns += ["here", "difference to vanilla", "before adaptation"]
    if experiment.coarse:
        columns.append("fine classes, by nearest images")
    columns += ["seeds", "parameters", "images per second on a GPU"]
    lines = [
        " ".join(part for part in (f"{experiment.title}.", experiment.note) if part),
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
    ]
    baseline = _accuracies(runs, BASELINE, "test_accuracy")
    for name, method in experiment.methods.items():
        mine = [run for run in runs if run["method"] == name]
        cells = [method.title]
        if published:
            cells.append(f"{published[name]:.2f}")
        if not mine:
            cells.append("not run")
            lines.append(f"| {' | '.join(cells)} |{' |' * (len(columns) - len(cells))}")
            continue
        found = _accuracies(runs, name, "test_accuracy")
        paired = [found[seed] - baseline[seed] for seed in found if seed in baseline]
        diverged = sum("diverged" in run for run in mine)
        note = f"diverged in {diverged} of {len(mine)}" if diverged else ""
        cells += [
            "; ".join(each for each in (_mean(found.values()), note) if each),
            "" if name == BASELINE else _mean(paired, "+"),
            _mean(_accuracies(runs, name, "test_unadapted_accuracy").values()),
        ]
        if experiment.coarse:
            cells.append(_mean(_accuracies(runs, name, "induction_accuracy").values()))
        cells += [
            ", ".join(str(run["seed"]) for run in mine),
            f"{mine[0]['parameters']:,}",
            run_records.images_per_second(mine),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _accuracies(runs: list[dict], method: str, key: str) -> dict[int, float]:
    return {
        run["seed"]: 100 * run[key]
        for run in runs
        if run["method"] == method and key in run
    }


def _mean(values, sign: str = "") -> str:
    values = list(values)
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.2f}{spread}"
