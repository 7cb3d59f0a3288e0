"""Makes every table of results/README.md, README and docs from the files in results/.

    python -m experiments.tables

Nothing is typed in by hand; what has no file is "not run".
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
from experiments.neural_similarity import implicit_regularization, predictor_cost
from experiments.page_tables import with_tables

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "results"

INTRODUCTION = """# Results

Data and pictures: one JSON file a run. Each names the command and the versions that made
it. What the runs of a folder share is in its `setting.json`. The tables below are made
from these files by `python -m experiments.tables`.

Every example writes below `runs/`, which git ignores. To renew a result, run the command
beside its table with `--output_dir=.`, in place of any other. A finished run is not made
twice, so delete its file first. Commit the files that changed, and the tables:

    rm results/few_shot/omniglot_cnn4_5way_1shot_tuned/maml_0.json
    python -m experiments.few_shot --dataset=omniglot --shots=1 ... --output_dir=.
    python -m experiments.tables

Most were made when the moving statistics of `layers.BatchNormalization` were averages over
the last ninth of the steps, not the last batch and some 32 examples, or the last 512th of
all. The two differ in the first thousand steps, and with a momentum of 0.99 in the first
ten thousands. Newer are those of `no_harm/runs_unbiased`, and the networks without batch
norm in `no_harm/runs`.

Commands are those that were called at the time. Some have changed their names since:
`examples.spirals` is `experiments.demo.spirals`, and `examples.implicit_regularization` is
`experiments.neural_similarity.implicit_regularization`."""


def results_readme() -> str:
    parts = [
        INTRODUCTION,
        experiments.demo.table.sections(RESULTS),
        experiments.neural_similarity.table.sections(RESULTS),
        experiments.few_shot.table.sections(RESULTS),
        implicit_regularization.section(RESULTS),
        predictor_cost.section(RESULTS),
        experiments.image_classification.table.sections(RESULTS),
        spirals.section(RESULTS),
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
    for page in pages():
        runs.write_text(page, with_tables(page.read_text()))


if __name__ == "__main__":
    main()
