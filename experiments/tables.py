"""Makes every table of results/, README and docs from the records in results/.

    python -m experiments.tables
    python -m experiments.tables --check    # Writes nothing; fails where a page is stale.

Nothing is typed in by hand; what has no record is "not run". Rows whose runs differ in
backend, or in the length or the learning rates of their trials, or whose trials ended at
chance, are "not comparable"; both commands fail where README or a matrix would compare such
rows. The check also fails where a row stands without what its experiment asks for (`FAIR`),
where a ± is not over seeds or draws of the records, and where a learning rate at the edge
of its trials has no star. On the pages of README and docs a table stands between
`<!-- table: NAME -->` and `<!-- end -->`, and is followed by its command and setting, or by
a link to them.
"""

import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import experiments.regression.table
import experiments.speed.table
from experiments import kills
from experiments.common import runs, tables
from experiments.demo import spirals, table as demo
from experiments.few_shot import calibration, sine_waves, table as few_shot
from experiments.image_classification import table as images
from experiments.neural_similarity import (
    implicit_regularization,
    kernel_shape,
    predictors,
    stability,
    table as similarity,
)
from experiments.no_harm import report
from experiments.no_harm.comparison import compare
from experiments.pretrained import table as pretrained
from experiments.serving import load
from experiments.small import __main__ as small

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "results"
FILES = "https://github.com/nsl-keras/nsl_keras/blob/main/results"
FEW_SHOT = "cifar_fs_small_cnn4_5way_5shot_augmented_tuned"
NARROW = "cnn9_default_16-32-64_cifar10_10000_2340_tuned"

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
        *(demo.section(RESULTS, name) for name in ("digits", "cifar10")),
        _all_settings(similarity),
        _all_settings(few_shot),
        sine_waves.section(RESULTS),
        calibration.section(RESULTS),
        implicit_regularization.section(RESULTS),
        predictors.section(RESULTS),
        stability.section(RESULTS),
        kernel_shape.section(RESULTS),
        small.section(RESULTS),
        _all_settings(images),
        spirals.section(RESULTS),
        pretrained.section(RESULTS),
        pretrained.section(RESULTS, "corrupted"),
        pretrained.recipe(RESULTS),
        pretrained.text(RESULTS),
        experiments.regression.table.section(RESULTS),
        experiments.speed.table.sections(RESULTS),
    ]
    return folded("\n\n".join(parts)) + "\n"


def _all_settings(experiment: Any) -> str:
    found = runs.all_of(RESULTS / experiment.PLACE)
    return "\n\n".join([experiment.TITLE, *map(experiment.section, found)])


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


def with_tables(text: str) -> str:
    return re.sub(
        r"<!-- table: (?P<name>\w+) -->\n.*?<!-- end -->",
        lambda match: (
            f"<!-- table: {match['name']} -->\n{TABLES[match['name']]()}\n<!-- end -->"
        ),
        text,
        flags=re.S,
    )


def _few_labels() -> str:
    """What to train of a pretrained network: README's recipe and its rivals."""
    found, sizes = pretrained.accuracies(RESULTS), pretrained.kilobytes(RESULTS)
    rivals, intents = _records(pretrained.RECIPE, "rivals"), _records(pretrained.TEXT)
    sentences = [run for run in intents.runs if run["domain"] == "clinc150"]
    of_sentences = {"regression": pretrained.BASELINE, "similarity": "M diagonal + head"}
    rows = []
    for step, title in pretrained.STEPS.items():
        name = of_sentences.get(step, step)
        own = tables.of_method(sentences, name)
        photographs = tables.of_method(rivals.runs, step)
        trained = own[0].get("trained", 0) if own else 0
        rows.append(
            [
                f"{title}{tables.star(photographs) or tables.star(own)}",
                pretrained.gain(found, step, ["photo"]),
                pretrained.gain(found, step, pretrained.CORRUPTIONS),
                sizes[step],
                pretrained.cell(sentences, name) if own else "",
                f"{4 * trained / 1000:,.0f}" if trained else "",
            ]
        )
    columns = [
        "accuracy, %; from the second row on, the difference to the first",
        "clean photographs",
    ]
    columns += ["corrupted ones", "kB of a task", "intents", "kB of a task"]
    made = tables.markdown(columns, rows)
    return _asked(made, pretrained.FAIR_RECIPE, rivals)


def _records(file: str, name: str = "") -> runs.RunRecords:
    return runs.RunRecords(RESULTS / file, name)


#: What tables lack that their experiments ask for.
LACKING: dict[str, None] = {}


def _asked(made: str, fair: tables.Fair, records: runs.RunRecords) -> str:
    """A table or page, of which the check is told what it lacks."""
    found = fair.problems(made, records.runs, tables.trials_of(records))
    LACKING.update(dict.fromkeys(f"{records.path.name}: {each}" for each in found))
    return made


def _of_setting(
    experiment: Any, name: str, asked: Any, columns: Sequence[int], **options: Any
) -> str:
    """The table of a setting's runs; `asked` are its rows, as the experiment names them."""
    records = _records(experiment.PLACE, name)
    made = _shown(experiment.section(records, asked), experiment.PLACE, columns, **options)
    return _asked(made, experiment.FAIR, records)


def _converged() -> str:
    """Both parts of the campaign of narrow networks."""
    how = (
        "`python -m experiments.campaign --plan=narrow --data_dir=DATA_DIR --output_dir=.`"
    )
    similar = _of_setting(similarity, NARROW, ["cost"], (0, 1, 2, 6, 8), how=how)
    name, columns = "convnet4_12-48-96-96_cifar10_10000_2340_tuned", (0, 1, 2, 3, 6, 8)
    adapted = _of_setting(images, name, ["table_1"], columns, how=how)
    return f"{similar}\n\n{adapted}"


def _apart(setting: str, *rates: float) -> str:
    """A table of trials: their records name the commands."""
    name = f"cnn9_default_{setting}_tuned"
    made = similarity.apart(RESULTS, name, rates)
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


def _section(
    module: Any, *kind: str, columns: Sequence[int] | None = None, name: str = ""
) -> str:
    made = _shown(module.section(RESULTS, *kind), module.PLACE, columns)
    fair = getattr(module, "FAIR", tables.Fair({}))
    return _asked(made, fair, _records(module.PLACE, name))


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
    table = "\n\n".join([table, *tables.notes(table)])
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
    "few_labels": _few_labels,
    "demo": lambda: _section(demo, "digits", name="digits"),
    "few_shot": lambda: _of_setting(
        *(few_shot, FEW_SHOT, few_shot.ALL, (0, 1, 2)),
        without=(tables.NOT_COMPARABLE, "layer of predictors", "ProtoNet, "),
    ),
    "static_few_shot": lambda: _of_setting(few_shot, _SMALL, few_shot.ADAPTED, range(4)),
    "dynamic_few_shot": lambda: _of_setting(
        few_shot, f"{_SMALL}_tuned", few_shot.DYNAMIC, (0, 1, 2)
    ),
    "calibration": lambda: _section(calibration),
    "uns": lambda: _apart("8-16-32_cifar10_5000_780", 0.01),
    "uns_long": lambda: _apart("8-16-32_cifar10_5000_2340", 0.01),
    "uns_test": lambda: _of_setting(
        similarity, "cnn9_default_8-16-32_cifar10_5000_2340", ["uns"], range(4)
    ),
    "uns_rates": lambda: _apart("16-32-64_cifar10_10000_2340", 0.003, 0.001),
    "cifar10": lambda: _of_setting(
        images, "convnet4_cifar10_all_1500", ["table_1"], (0, 1, 2, 3, 5)
    ),
    "inner_steps": lambda: _of_setting(images, _MNIST, ["A.5"], range(5)),
    "classifiers": lambda: _of_setting(images, _MNIST, ["A.6"], range(4)),
    "converged": _converged,
    "regression": lambda: _section(experiments.regression.table),
    "pretrained": lambda: _section(pretrained, columns=(0, 1, 5, 9, 10)),
    "corruptions": lambda: _section(pretrained, "corrupted", columns=(0, 1, 7, 13, 14)),
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

#: Of a page with figures that are typed in, and the records they come from.
TYPED = {
    "which_method.md": (
        (pretrained.FAIR, (pretrained.PLACE,)),
        (demo.FAIR, (demo.PLACE, "digits")),
        (similarity.FAIR, (similarity.PLACE, NARROW)),
    )
}


def made() -> dict[pathlib.Path, str]:
    """The text of every page that has a table."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {
        RESULTS / "README.md": results_readme(),
        RESULTS / "no_harm.md": report.page(RESULTS),
        **{page: with_tables(page.read_text()) for page in pages},
    }


def main(arguments: list[str]) -> None:
    """Writes the pages; with --check fails where one is stale or compares unfairly."""
    texts = made()
    stale = {page: text for page, text in texts.items() if page.read_text() != text}
    if "--check" in arguments:
        names = ", ".join(str(page.relative_to(ROOT)) for page in stale)
        found = [f"Call python -m experiments.tables for {names}."] if names else []
        for page, text in texts.items():
            found += [f"{page.name}: {each}" for each in tables.unstated(text)]
            for fair, place in TYPED.get(page.name, ()):
                _asked(text, fair, _records(*place))
        raise SystemExit("\n".join([*found, *LACKING]) or 0)
    for page, text in stale.items():
        runs.write_text(page, text)


if __name__ == "__main__":
    main(sys.argv[1:])
