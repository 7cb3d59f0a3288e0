"""Makes the documentation's pages that come from docstrings, notebooks and results.

    python -m tools.documentation                # below docs/, for `zensical serve`
    python -m tools.documentation --folder=DOCS

They are `api/`, `notebooks/` and `results/` in that folder, which are removed before they
are written. Notebooks are shown as they are stored; none is run.
"""

from __future__ import annotations

import os
import pathlib
import shutil

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags

import experiments.speed.table
from experiments import tables
from tools.documentation import interface, notebooks

FLAGS = flags.FLAGS
GENERATED = ("api", "notebooks", "results")


def write_results(results: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the pages of all results, and the pictures that pages show."""
    everything = tables.results_readme()
    step_times = experiments.speed.table.sections(results)
    folder.mkdir(parents=True)
    (folder / "all.md").write_text(everything.replace(step_times, ""))
    (folder / "step_times.md").write_text(f"# Step times and memory\n\n{step_times}\n")
    shutil.copy(results / "no_harm.md", folder)
    shutil.copytree(results / "figures", folder / "figures")


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Unknown arguments: {arguments[1:]}")
    folder = pathlib.Path(FLAGS.folder)
    for name in GENERATED:
        shutil.rmtree(folder / name, ignore_errors=True)
    interface.write_pages(folder / "api")
    notebooks.write_pages(folder / "notebooks")
    write_results(tables.RESULTS, folder / "results")


if __name__ == "__main__":
    flags.DEFINE_string("folder", "docs", "The folder of the documentation's pages.")
    app.run(main)
