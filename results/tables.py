"""Makes every table of `results/README.md` and of the README from the JSON files here.

    python -m results.tables          # or `make results`

Nothing is typed in by hand; what has no file is "not run".
"""

from __future__ import annotations

import json
import pathlib
import re

from examples import (
    few_shot_table,
    image_classification_table,
    implicit_regularization_table,
    neural_similarity_table,
    regression_table,
    similarity_methods,
)
from examples.demo_table import table

FOLDER = pathlib.Path(__file__).parent
README = FOLDER.parent / "README.md"
DATASETS = ("digits", "mnist", "cifar10")
BENCHMARKS = ("static", "dynamic", "formulations", "head", "model", "few_shot")


def read(name: str) -> dict | None:
    path = FOLDER / name
    return json.loads(path.read_text()) if path.exists() else None


def classification_section(dataset: str) -> str:
    title = f"## Demo: {dataset}"
    content = read(f"demo_{dataset}.json")
    if content is None:
        return f"{title}\n\nNot run."
    seeds = max(row["seeds"] for row in content["table"])
    return (
        f"{title}\n\n"
        f"`{content['command']}`: {content['train_examples']:,} training images, "
        f"{content['recipe']['epochs']} epochs, {content['test_examples']:,} test images, "
        f"{seeds} seed(s); mean ± standard deviation, differences paired by seed.\n\n"
        f"{table(content['table'])}\n\n"
        f"Served without nsl_keras: {content['served']['agreeing_predictions']} of "
        f"{content['served']['test_images']} predictions agree, logits to "
        f"{content['served']['largest_logit_difference']:.1e}."
    )


def tuning_section(dataset: str) -> str:
    content = read(f"demo_{dataset}_tuning.json")
    if content is None:
        return ""
    settings: dict[tuple, list[float]] = {}
    for trial in content["trials"]:
        setting = tuple(
            f"{key}={trial[key]:g}"
            for key in content["recipe"]
            if isinstance(trial.get(key), (int, float))
        )
        accuracies = settings.setdefault((trial["model"], ", ".join(setting)), [])
        accuracies.append(trial["validation_accuracy"])
    rows = [
        f"| {model} | {setting} | {100 * sum(found) / len(found):.2f} |"
        for (model, setting), found in settings.items()
    ]
    return "\n".join(
        [
            f"Hyper-parameters, chosen on validation images (`{content['command']}`):",
            "",
            "| model | setting | validation accuracy, % |",
            "|---|---|---|",
            *rows,
        ]
    )


def neural_similarity_sections() -> list[str]:
    """One section a setting of `examples.neural_similarity`, then what was not run."""
    found = sorted(FOLDER.glob("neural_similarity_*.json"))
    ran = {number for path in found for number in neural_similarity_table.tables_of(path)}
    rest = [number for number in similarity_methods.TABLES if number not in ran]
    return [
        "## Neural Similarity Learning, Tables 1 to 5 and 8",
        *(neural_similarity_table.section(path) for path in found),
        neural_similarity_table.not_run(rest) if rest else "",
    ]


def image_classification_sections() -> list[str]:
    """One section a setting of `examples.image_classification`, then what was not run."""
    found = sorted(FOLDER.glob("image_classification_*.json"))
    return [
        "## Meta-Neighborhoods, Table 1 and Appendices A.3 to A.9: image classification",
        *(image_classification_table.section(path) for path in found),
        pictures_section(found),
        image_classification_table.not_run(found),
    ]


def pictures_section(found: list[pathlib.Path]) -> str:
    """Links to what `--figures` drew, one line a backbone and data set."""
    settings = [json.loads(path.read_text())["setting"] for path in found]
    drawn = []
    for name in sorted({f"{each['backbone']}_{each['dataset']}" for each in settings}):
        pictures = sorted((FOLDER / "figures").glob(f"{name}_*.png"))
        links = [f"[{path.stem}](figures/{path.name})" for path in pictures]
        drawn += [", ".join(links)] if links else []
    if not drawn:
        return ""
    title = "### Pictures of the first seed's models"
    what = (
        "Learned neighbours among the features of images, what each entry stands for, the "
        "cosines to the true prototype before and after adaptation, and how one prediction "
        "is made."
    )
    return "\n\n".join([title, what, *drawn])


def few_shot_sections() -> list[str]:
    """One section a setting of `examples.few_shot`, or the published figures alone."""
    found = sorted(FOLDER.glob("few_shot_*shot*.json"))
    tables = [path for path in found if not path.stem.endswith("_trials")]
    return [
        "## Neural Similarity Learning, Table 6: few-shot learning",
        *(few_shot_table.section(path) for path in tables),
        "" if tables else few_shot_table.not_run(),
    ]


def implicit_regularization_section() -> str:
    title = "## Neural Similarity Learning, Section 5.1: implicit regularization"
    content = read("implicit_regularization.json")
    if content is None:
        return f"{title}\n\nNot run."
    seeds = 1 + max(run["seed"] for run in content["runs"])
    return (
        f"{title}\n\n"
        f"`{content['command']}`: linear regression by gradient descent on `W`, or on the "
        "factors `W'` and `M` of `W = M^T W'`, from the same small `W`; "
        f"{content['runs'][0]['steps'][-1]:,} steps, means over {seeds} problem(s).\n\n"
        f"{implicit_regularization_table.table(content)}\n\n"
        "![Nuclear norm and effective rank in training]"
        "(figures/implicit_regularization.png)"
    )


def spirals_section() -> str:
    title = "## Meta-Neighborhoods, Figure 3: spirals"
    content = read("spirals.json")
    if content is None:
        return f"{title}\n\nNot run."
    return (
        f"{title}\n\n"
        f"`{content['command']}`: {100 * content['test_accuracy']:.1f} % of "
        f"{content['test_examples']:,} test points with {content['num_neighbors']} "
        f"neighbours, {100 * content['linear_test_accuracy']:.1f} % for a linear head by "
        "itself.\n\n"
        "![Entries and classes in training](figures/spirals.png)\n\n"
        "As an animation: [figures/spirals.gif](figures/spirals.gif)."
    )


def benchmark_section(group: str) -> str:
    content = read(f"benchmarks/benchmarks_{group}.json")
    if content is None:
        return f"### {group}\n\nNot run."
    lines = [
        f"### {group}",
        "",
        f"`{content['command']}`, {content['cores']} CPU cores.",
        "",
        "| case | candidate | baseline | XLA | ratio | 95 % interval | rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for measured in content["tables"]:
        for row in measured["rows"]:
            lines.append(
                f"| {row['case']} | {row['candidate']} | {row['baseline']} "
                f"| {measured['xla']} | {_ratio(row['median'])} "
                f"| {_ratio(row['low'])} to {_ratio(row['high'])} | {row['rounds']} |"
            )
    return "\n".join(lines)


def _ratio(number: float) -> str:
    """Two digits at least, also where a candidate takes a hundredth of the time."""
    return f"{number:.2f}" if number >= 0.1 else f"{number:.2g}"


def memory_section() -> str:
    content = read("benchmarks/benchmarks_memory.json")
    if content is None:
        return "## Peak memory\n\nNot run."
    lines = [
        "## Peak memory",
        "",
        "Largest resident memory of one pass above that before it, each case in a process "
        f"of its own (`{content['command']}`).",
        "",
        "| case | candidate | XLA | MiB |",
        "|---|---|---|---|",
    ]
    for measured in content["tables"]:
        for row in measured["rows"]:
            lines.append(
                f"| {row['case']} | {row['candidate']} | {measured['xla']} "
                f"| {row['mebibytes']:.0f} |"
            )
    return "\n".join(lines)


def results_readme() -> str:
    parts = [
        "# Results",
        "Made by `make results` from the JSON files in this folder, each of which names "
        "the command that wrote it.",
    ]
    for dataset in DATASETS:
        parts += [classification_section(dataset), tuning_section(dataset)]
    parts += [*neural_similarity_sections(), *few_shot_sections()]
    parts += [implicit_regularization_section()]
    parts += [*image_classification_sections()]
    parts += [spirals_section(), regression_table.section(FOLDER)]
    parts += [
        "## Step times",
        "Ratios to the plain Keras layer or model in the same process, interleaved rounds, "
        "median and its 95 % interval (`make bench`).",
    ]
    parts += [benchmark_section(group) for group in BENCHMARKS]
    parts += [memory_section()]
    return "\n\n".join(part for part in parts if part) + "\n"


def readme_with_tables(text: str) -> str:
    """The README with the parts between `<!-- table: name -->` markers made anew."""

    def made_anew(match: re.Match) -> str:
        content = read(f"demo_{match['name']}.json")
        made = "Not run." if content is None else table(content["table"])
        return f"<!-- table: {match['name']} -->\n{made}\n<!-- end -->"

    pattern = r"<!-- table: (?P<name>\w+) -->\n.*?<!-- end -->"
    return re.sub(pattern, made_anew, text, flags=re.S)


def main() -> None:
    (FOLDER / "README.md").write_text(results_readme())
    README.write_text(readme_with_tables(README.read_text()))


if __name__ == "__main__":
    main()
