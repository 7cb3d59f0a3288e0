"""Tables 1 to 5 and 8 of Neural Similarity Learning from runs, beside the paper's."""

from __future__ import annotations

import json
import pathlib
import statistics

from examples import run_records, similarity_methods


def section(path: pathlib.Path, tables: list[str] | None = None) -> str:
    """Markdown of a results file: its setting, and the tables it has runs of.

    Args:
        path: A file that `examples.neural_similarity` wrote.
        tables: Numbers of tables; `None` is all with a run besides the baseline's.
    """
    content = json.loads(path.read_text())
    setting, runs = content["setting"], content["runs"]
    parts = [_heading(setting, runs)]
    for number in tables_of(path) if tables is None else tables:
        parts.append(_table(number, setting["dataset"], runs))
    return "\n\n".join(parts)


def tables_of(path: pathlib.Path) -> list[str]:
    """Numbers of the tables of which a results file has more than the baseline."""
    content = json.loads(path.read_text())
    ran = {run["method"] for run in content["runs"]}
    return [
        number
        for number, table in similarity_methods.TABLES.items()
        if table.network == content["setting"]["network"]
        and ran & set(table.methods) - {table.baseline}
    ]


def not_run(numbers: list[str]) -> str:
    """Markdown of tables of which nothing was run: the paper's figures alone."""
    parts = ["### Not run", "The paper's errors, in %."]
    for number in numbers:
        table = similarity_methods.TABLES[number]
        datasets = list(
            dict.fromkeys(name for errors in table.errors.values() for name in errors)
        )
        lines = [
            f"Table {number}. {table.title}",
            "",
            f"| method | {' | '.join(datasets)} | here |",
            f"|{'---|' * (len(datasets) + 2)}",
        ]
        for name, method in table.methods.items():
            cells = [_published(table.errors[name].get(dataset)) for dataset in datasets]
            lines.append(f"| {method.title} | {' | '.join(cells)} | not run |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _heading(setting: dict, runs: list[dict]) -> str:
    recipe = setting["recipe"]
    drops = ", ".join(f"{drop:,}" for drop in recipe["rate_drops"])
    variant = f" ({setting['variant']} variant)" if setting["variant"] else ""
    commands = dict.fromkeys(f"`{run['command']}`" for run in runs)
    return (
        f"### {setting['network']}{variant} on {setting['dataset']}: "
        f"{setting['train_examples']:,} images, {recipe['iterations']:,} iterations\n\n"
        f"{'; '.join(commands)}. {recipe['optimizer']} at {recipe['learning_rate']:g}, "
        f"divided by 10 at {drops}; batches of {recipe['batch_size']}, augmentation "
        f"{recipe['augmentation']}, batch norm momentum "
        f"{recipe['batch_normalization_momentum']:g}. Errors on "
        f"{setting['test_examples']:,} test images after the last step, in %, mean ± "
        "standard deviation over seeds; differences paired by seed."
    )


def _table(number: str, dataset: str, runs: list[dict]) -> str:
    table = similarity_methods.TABLES[number]
    if not any(dataset in errors for errors in table.errors.values()):
        dataset = next(iter(table.errors[table.baseline]))
    columns = ["method", f"paper ({dataset})", "here", "difference to baseline", "seeds"]
    columns += ["paper, top-5", "top-5"] if table.top_5_errors else []
    columns += ["parameters", "images per second on a GPU"]
    lines = [
        f"Table {number}. {table.title}",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
    ]
    baseline = _errors(runs, table.baseline, "test_accuracy")
    for name, method in table.methods.items():
        mine = [run for run in runs if run["method"] == name]
        errors = _errors(runs, name, "test_accuracy")
        paired = [errors[seed] - baseline[seed] for seed in errors if seed in baseline]
        cells = [method.title, _published(table.errors[name].get(dataset))]
        if not mine:
            cells += ["not run"] + [""] * (len(columns) - 3)
        else:
            diverged = sum("diverged" in run for run in mine)
            note = f"diverged in {diverged} of {len(mine)}" if diverged else ""
            cells += [
                "; ".join(each for each in (_mean(errors.values()), note) if each),
                "" if name == table.baseline else _mean(paired, "+"),
                ", ".join(str(run["seed"]) for run in mine),
            ]
            if table.top_5_errors:
                cells.append(f"{table.top_5_errors[name]:.2f}")
                cells.append(_mean(_errors(runs, name, "test_top_5").values()))
            cells += [f"{mine[0]['parameters']:,}", run_records.images_per_second(mine)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _errors(runs: list[dict], method: str, key: str) -> dict[int, float]:
    return {
        run["seed"]: 100 * (1 - run[key])
        for run in runs
        if run["method"] == method and key in run
    }


def _published(error: float | None) -> str:
    return "" if error is None else f"{error:.2f}"


def _mean(values, sign: str = "") -> str:
    values = list(values)
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.2f}{spread}"
