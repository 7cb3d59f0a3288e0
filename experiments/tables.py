"""Makes every table of results/, README and docs from the records in results/.

    python -m experiments.tables
    python -m experiments.tables --check    # Writes nothing; fails where a page is stale.

Nothing is typed in by hand; what has no record is "not run". Rows whose runs differ in
backend, or in the length or the learning rates of their trials, or whose trials ended at
chance, are "not comparable"; both
commands fail where README or a matrix would compare such rows. On the pages of README and
docs a table stands between `<!-- table: NAME -->` and `<!-- end -->`, and is followed by
its command and setting, or by a link to them.
"""

import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import experiments.demo.table
import experiments.few_shot.table
import experiments.image_classification.table
import experiments.neural_similarity.table
import experiments.regression.table
import experiments.speed.table
from experiments import kills
from experiments.common import runs, tables
from experiments.demo import spirals
from experiments.few_shot import calibration, sine_waves
from experiments.few_shot import methods as few_shot_methods
from experiments.neural_similarity import (
    implicit_regularization,
    kernel_shape,
    predictors,
    stability,
)
from experiments.no_harm import report
from experiments.no_harm.comparison import compare
from experiments.pretrained import table as pretrained
from experiments.serving import load
from experiments.small import __main__ as small

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "results"
FILES = "https://github.com/nsl-keras/nsl_keras/blob/main/results"
DEMO = ("digits", "mnist", "cifar10")
FEW_SHOT = "few_shot.jsonl", "cifar_fs_small_cnn4_5way_5shot_augmented_tuned"

INTRODUCTION = """# Results

The records behind every table and picture, one file an experiment, one line of JSON a run:
the key that identifies it, what was measured, the commit of this package that ran it, and,
where a file has them, its setting, the command and the versions. For older runs, the commit
is the first that contains the record, and the command names module and methods as they are
called today.
`python -m experiments.tables` makes the tables from the records. Where a section does not
say otherwise, a cell is a mean over seeds ± their standard deviation, and differences are
paired by seed.

Commands write below `runs/`, which git ignores. To renew a result, delete its line, run the
command beside its table with `--output_dir=.` in place of any other, and make the tables.

Before commit cc419c7 the moving statistics of `layers.BatchNormalization` were averages
over the last ninth of the steps; now they are averages over the last 512th of the examples,
or the last batch and 32 examples if that is more. The two differ in the first thousands of
steps. [Do no harm](no_harm.md) is a separate page."""


def results_readme() -> str:
    parts = [
        INTRODUCTION,
        *(experiments.demo.table.section(RESULTS, name) for name in DEMO),
        experiments.neural_similarity.table.sections(RESULTS),
        experiments.few_shot.table.sections(RESULTS),
        sine_waves.section(RESULTS),
        calibration.section(RESULTS),
        implicit_regularization.section(RESULTS),
        predictors.section(RESULTS),
        stability.section(RESULTS),
        kernel_shape.section(RESULTS),
        small.section(RESULTS),
        experiments.image_classification.table.sections(RESULTS),
        spirals.section(RESULTS),
        pretrained.section(RESULTS),
        pretrained.section(RESULTS, "corrupted"),
        pretrained.recipe(RESULTS),
        pretrained.text(RESULTS),
        experiments.regression.table.section(RESULTS),
        experiments.speed.table.sections(RESULTS),
    ]
    return folded("\n\n".join(parts)) + "\n"


def folded(text: str) -> str:
    """The text with what stands below a heading behind a fold, but for pictures."""
    first, *others = re.split(r"^(##+ .*)$", text, flags=re.M)
    parts = [first.strip()]
    for heading, body in zip(others[::2], others[1::2], strict=True):
        blocks = body.strip().split("\n\n")
        pictures = [block for block in blocks if block.startswith("![")]
        rest = "\n\n".join(block for block in blocks if block not in pictures)
        if rest.count("\n|") > 4:  # A table.
            summary = f"<summary>{heading.lstrip('# ')}</summary>"
            rest = f'<details markdown="1">\n{summary}\n\n{rest}\n\n</details>'
        parts += [heading, rest, *pictures]
    return "\n\n".join(part for part in parts if part)


def pages() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def with_tables(text: str) -> str:
    return re.sub(
        r"<!-- table: (?P<name>\w+) -->\n.*?<!-- end -->",
        lambda match: (
            f"<!-- table: {match['name']} -->\n{TABLES[match['name']]()}\n<!-- end -->"
        ),
        text,
        flags=re.S,
    )


def _where() -> str:
    """One row a kind of problem: points above a plain network, here and with rivals."""
    photographs = _records(pretrained.RECIPE).runs

    def above(step: str, baseline: str = "regression") -> str:
        found = [each["accuracy"] for each in photographs]
        return tables.mean([100 * (each[step] - each[baseline]) for each in found], "+")

    studied = [
        each
        for each in _records(pretrained.PLACE).runs
        if each["domain"] in pretrained.CORRUPTED and each["shots"] == 5
    ]
    names = "LoRA of rank 1 + head", "everything", "M unconstrained + head"
    lora, everything, similarity = (pretrained.cell(studied, each) for each in names)
    few_shot = _records(*FEW_SHOT)
    trials = tables.trials_of(few_shot)
    steps = {
        row["candidate"]: f"{row['median']:.1f}x per training step"
        for each in experiments.speed.table.measured(RESULTS, "network")
        for row in each["rows"]
        if row["case"].startswith("few-shot") and each["xla"] == "off"
    }

    def new_classes(name: str, title: str) -> str:
        row = few_shot_methods.METHODS[name].title
        pair = [tables.of_method(few_shot.runs, each) for each in (name, "finetuning")]
        tables.require_comparable(*pair, trials)
        own, plain = ({run["seed"]: run["accuracy"] for run in each} for each in pair)
        above = [f"{100 * (own[seed] - plain[seed]):+.2f}" for seed in sorted(own)]
        return f"{title}: {' and '.join(above)} ({steps.get(row, '3.3x the training')})"

    wider = new_classes("same_parameters", "wider network with as many parameters")
    rows = [
        [
            "five photographs per class, clean and corrupted",
            f"`Finetuner.adapt`: {above('adapt')}; then a similarity, trained and folded: "
            f"{above('similarity')}, of which over the classifier alone "
            f"{above('similarity', 'head')}",
            "logistic regression on the network's features: 0; "
            f"the classifier alone, trained as long: {above('head')}. From the regression, "
            f"on five corruptions with four draws: LoRA of rank 1 {lora}, all weights "
            f"{everything}, a similarity {similarity}",
            "none once folded",
        ],
        [
            "new classes of CIFAR-100, five images per class",
            new_classes("dynamic_nsn", "dynamic diagonal similarity"),
            f"{wider}; {new_classes('longer', 'longer training')}",
            "time and memory of the predictors",
        ],
    ]
    columns = ["situation", "with this package", "instead", "price at inference"]
    return tables.markdown(columns, rows)


def _cells(table: str, title: str) -> list[str]:
    """The cells of a row of a Markdown table after its title."""
    row = next(line for line in table.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def _records(file: str, name: str = "") -> runs.RunRecords:
    return runs.RunRecords(RESULTS / file, name)


def _image_classification(
    name: str, columns: Sequence[int], how: str | None = None, experiment: str = "table_1"
) -> str:
    records = _records("image_classification.jsonl", name)
    made = experiments.image_classification.table.section(records, [experiment])
    return _shown(made, records.path.name, columns, how)


def _few_shot(
    columns: Sequence[int], name: str = FEW_SHOT[1], *rows: Any, without: Sequence[str] = ()
) -> str:
    made = experiments.few_shot.table.section(_records(FEW_SHOT[0], name), *rows)
    return _shown(made, FEW_SHOT[0], columns, without=without)


def _similarity(
    setting: str, number: str, columns: Sequence[int], how: str | None = None
) -> str:
    records = _records("neural_similarity.jsonl", f"cnn9_default_{setting}")
    made = experiments.neural_similarity.table.section(records, [number])
    return _shown(made, records.path.name, columns, how)


def _converged() -> str:
    """Both parts of the campaign of narrow networks."""
    narrow = "cifar10_10000_2340_tuned"
    how = (
        "`python -m experiments.campaign --plan=narrow --data_dir=DATA_DIR --output_dir=.`"
    )
    similar = _similarity(f"16-32-64_{narrow}", "cost", (0, 1, 2, 4, 6, 8), how)
    adapted = _image_classification(
        f"convnet4_12-48-96-96_{narrow}", (0, 1, 2, 3, 4, 6, 8), how
    )
    return f"{similar}\n\n{adapted}"


def _apart(setting: str, *rates: float) -> str:
    """A table of trials: their records name the commands."""
    name = f"cnn9_default_{setting}_tuned"
    made = experiments.neural_similarity.table.apart(RESULTS, name, rates)
    how = "`experiments.neural_similarity`, trials"
    columns = range(4 + len(rates) - 1)
    return _shown(made, "neural_similarity_tuning.jsonl", columns, how)


def _no_harm() -> str:
    found = report.load(RESULTS, "unbiased")
    command = (
        f"`python -m experiments.no_harm --output_dir=.` ({tables.commits(found)}), for "
        "networks with batch norms with `--batch_norm=unbiased`"
    )
    made = report.summary_table(compare(found))
    return _shown(f"{command}\n\n{made}", report.PLACE, range(4))


def _prices(group: str) -> str:
    """A row for each case and candidate: multiples of time, with XLA behind, and memory."""
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    found = experiments.speed.table.measured(RESULTS, group)
    for row in (row for each in found for row in each["rows"]):
        case, _, what = row["case"].rpartition(", ")
        cells = rows.setdefault((case, row["candidate"]), {})
        cells.setdefault(f"{what}: time", []).append(f"{row['median']:.2f}x")
        if "mebibytes" in row:
            memory = row["mebibytes"] / row["baseline_mebibytes"]
            cells[f"{what}: memory"] = [f"{memory:.2f}x"]
    columns = ["of", "method", *next(iter(rows.values()))]
    made = tables.markdown(
        columns, ([*key, *map(" / ".join, cells.values())] for key, cells in rows.items())
    )
    return _shown(f"{tables.commands(found)}\n\n{made}", "benchmarks.jsonl")


def _section(module: Any, *kind: str, columns: Sequence[int] | None = None) -> str:
    return _shown(module.section(RESULTS, *kind), module.PLACE, columns)


def _shown(
    section: str,
    file: str,
    columns: Sequence[int] | None = None,
    how: str | None = None,
    without: Sequence[str] = (),
) -> str:
    """The first table of a section, of it some columns, and no rows that say `without`.

    Below it: `how` it was made, or a link to the section in results/README.md, which says
    what was run. A section without a heading is not there: what it says is folded.
    """
    parts = [part for part in section.split("\n\n") if not part.startswith("![")]
    first = next((i for i, part in enumerate(parts) if part.startswith("|")), None)
    if first is None:
        return "\n\n".join(part for part in parts if not part.startswith("#"))
    lines = [line.strip("|").split("|") for line in parts[first].splitlines()]
    kept = range(len(lines[0])) if columns is None else columns
    table = "\n".join(
        f"|{'|'.join(cells[number] for number in kept)}|"
        for cells in lines
        if not any(each in cell for cell in cells for each in without)
    )
    records = f"{FILES}/{file}"
    if how is None and parts[0].startswith("#"):
        anchor = re.sub(r"[^\w\- ]", "", parts[0].strip("# ").lower()).replace(" ", "-")
        how = f"[Command]({FILES}/README.md#{anchor})"
    if how:
        return f"{table}\n\n{how}, [records]({records})."
    how = "\n\n".join(parts[:first])
    return f"""{table}

<details markdown="1">
<summary>Command, setting and records</summary>

{how}

The records: [`results/{file}`]({records}).

</details>"""


_SMALL = "cifar_fs_small_16_cnn4_5way_5shot_augmented"
_MNIST = "convnet4_12-48-96-96_mnist_5000_390"
TABLES: dict[str, Callable[[], str]] = {
    "where": _where,
    "demo": lambda: _section(experiments.demo.table, "digits"),
    "rivals": lambda: experiments.demo.table.rivals(
        _records(experiments.demo.table.PLACE, "digits_rivals").runs
    ),
    "few_shot": lambda: _few_shot(
        (0, 1, 2), without=(tables.NOT_COMPARABLE, "layer of predictors")
    ),
    "static_few_shot": lambda: _few_shot(
        range(4), _SMALL, experiments.few_shot.table.ADAPTED
    ),
    "dynamic_few_shot": lambda: _few_shot(
        (0, 1, 2, 3, 5), f"{_SMALL}_tuned", experiments.few_shot.table.DYNAMIC
    ),
    "calibration": lambda: _section(calibration),
    "uns": lambda: _apart("8-16-32_cifar10_5000_780", 0.01),
    "uns_long": lambda: _apart("8-16-32_cifar10_5000_2340", 0.01),
    "uns_test": lambda: _similarity("8-16-32_cifar10_5000_2340", "uns", range(4)),
    "uns_rates": lambda: _apart("16-32-64_cifar10_10000_2340", 0.003, 0.001),
    "cifar10": lambda: _image_classification("convnet4_cifar10_all_1500", range(6)),
    "inner_steps": lambda: _image_classification(_MNIST, range(5), experiment="A.5"),
    "classifiers": lambda: _image_classification(_MNIST, range(4), experiment="A.6"),
    "converged": _converged,
    "regression": lambda: _section(experiments.regression.table),
    "pretrained": lambda: _section(pretrained, columns=(0, 1, 5, 9, 10)),
    "corruptions": lambda: _section(
        pretrained, "corrupted", columns=(0, 1, 7, 13, 14, 15, 16)
    ),
    "recipe": lambda: _shown(pretrained.recipe(RESULTS), pretrained.RECIPE),
    "no_harm": _no_harm,
    "stability": lambda: _section(stability, columns=(0, 2, 3, 5)),
    "kernel_shape": lambda: _section(kernel_shape),
    "small": lambda: _section(small),
    "prices": lambda: _prices("prices"),
    "transformer": lambda: _prices("transformer"),
    "kills": lambda: kills.section(RESULTS),
    "load": lambda: _section(load),
}


def made() -> dict[pathlib.Path, str]:
    """The text of every page that has a table."""
    return {
        RESULTS / "README.md": results_readme(),
        RESULTS / "no_harm.md": report.page(RESULTS),
        **{page: with_tables(page.read_text()) for page in pages()},
    }


def main(arguments: list[str]) -> None:
    """Writes the pages; with --check fails where they differ from the records."""
    stale = {page: text for page, text in made().items() if page.read_text() != text}
    if "--check" in arguments:
        names = ", ".join(str(page.relative_to(ROOT)) for page in stale)
        raise SystemExit(f"Call python -m experiments.tables for {names}." if names else 0)
    for page, text in stale.items():
        runs.write_text(page, text)


if __name__ == "__main__":
    main(sys.argv[1:])
