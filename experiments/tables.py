"""Makes every table of results/, README and docs from the records in results/.

    python -m experiments.tables

Nothing is typed in by hand; what has no record is "not run".
"""

from __future__ import annotations

import pathlib

import experiments.demo.table
import experiments.few_shot.table
import experiments.image_classification.table
import experiments.neural_similarity.table
import experiments.regression.table
import experiments.speed.table
from experiments.common import runs
from experiments.demo import spirals
from experiments.few_shot import sine_waves
from experiments.neural_similarity import implicit_regularization, predictors
from experiments.no_harm import report
from experiments.page_tables import with_tables
from experiments.pretrained import table as pretrained

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "results"

INTRODUCTION = """# Results

The records behind every table and picture, one file an experiment, one line of JSON a run:
its setting, the key that identifies it, what was measured, the command, the versions, and
the commit of this package that ran it. For older runs, the commit is the first that
contains the record, and the command names module and methods as they are called today.
`python -m experiments.tables` makes the tables from the records.

Commands write below `runs/`, which git ignores. To renew a result, delete its line, run the
command beside its table with `--output_dir=.` in place of any other, and make the tables.

Before commit cc419c7 the moving statistics of `layers.BatchNormalization` were averages
over the last ninth of the steps; now they are averages over the last 512th of the examples,
or the last batch and 32 examples if that is more. The two differ in the first thousands of
steps. [Do no harm](no_harm.md) is a separate page."""


def results_readme() -> str:
    parts = [
        INTRODUCTION,
        experiments.demo.table.sections(RESULTS),
        experiments.neural_similarity.table.sections(RESULTS),
        experiments.few_shot.table.sections(RESULTS),
        sine_waves.section(RESULTS),
        implicit_regularization.section(RESULTS),
        predictors.section(RESULTS),
        experiments.image_classification.table.sections(RESULTS),
        spirals.section(RESULTS),
        pretrained.section(RESULTS),
        experiments.regression.table.section(RESULTS),
        experiments.speed.table.sections(RESULTS),
    ]
    return "\n\n".join(parts) + "\n"


def pages() -> list[pathlib.Path]:
    """Returns README and documentation, which have tables between markers."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs" / "guides").glob("*.md")),
    ]


def main() -> None:
    runs.write_text(RESULTS / "README.md", results_readme())
    runs.write_text(RESULTS / "no_harm.md", report.page(RESULTS))
    for page in pages():
        runs.write_text(page, with_tables(page.read_text()))


if __name__ == "__main__":
    main()
