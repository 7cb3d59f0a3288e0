"""Makes the tables of results/README.md, the README and docs/ from the files in results/.

    python -m examples.tables          # or `make results`

Nothing is typed in by hand; what has no file is "not run".
"""

from __future__ import annotations

import pathlib
import re

import benchmarks.table
import examples.demo.table
import examples.few_shot.table
import examples.image_classification.table
import examples.neural_similarity.table
import examples.regression.table
from examples.common import runs
from examples.demo import spirals
from examples.neural_similarity import implicit_regularization, predictor_cost
from examples.serving import guide

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "results"

INTRODUCTION = """# Results

Data and pictures: one JSON file a run. Each names the command and the versions that made
it. What the runs of a folder share is in its `setting.json`. `make results` makes the
tables below from these files.

Every example writes below `runs/`, which git ignores. To renew a result, run the command
beside its table: it has `--output_dir=.`, or add that. A finished run is not made twice, so
delete its file first. Commit the files that changed, and the tables:

    rm results/few_shot/omniglot_cnn4_5way_1shot/maml_0.json
    python -m examples.few_shot --dataset=omniglot --shots=1 ... --output_dir=.
    make results

Commands are those that were called at the time. Some have changed their names since:
`examples.spirals` is `examples.demo.spirals`, and `examples.implicit_regularization` is
`examples.neural_similarity.implicit_regularization`."""


def results_readme() -> str:
    parts = [
        INTRODUCTION,
        examples.demo.table.sections(RESULTS),
        examples.neural_similarity.table.sections(RESULTS),
        examples.few_shot.table.sections(RESULTS),
        implicit_regularization.section(RESULTS),
        predictor_cost.section(RESULTS),
        examples.image_classification.table.sections(RESULTS),
        spirals.section(RESULTS),
        examples.regression.table.section(RESULTS),
        benchmarks.table.sections(RESULTS),
    ]
    return "\n\n".join(parts) + "\n"


def readme_with_tables(text: str) -> str:
    """The README with the parts between `<!-- table: name -->` markers made anew."""

    def made_anew(match: re.Match) -> str:
        found = runs.RunRecords(RESULTS / "demo" / match["name"]).runs
        made = examples.demo.table.table(found) if found else "Not run."
        return f"<!-- table: {match['name']} -->\n{made}\n<!-- end -->"

    pattern = r"<!-- table: (?P<name>\w+) -->\n.*?<!-- end -->"
    return re.sub(pattern, made_anew, text, flags=re.S)


def main() -> None:
    (RESULTS / "README.md").write_text(results_readme())
    readme = ROOT / "README.md"
    readme.write_text(readme_with_tables(readme.read_text()))
    guide.main()


if __name__ == "__main__":
    main()
