"""Makes the pages of the documentation site from docs/, results, docstrings and notebooks.

    python -m tools.documentation

They are written below build/docs, from where `zensical` makes the site. Notebooks are shown
as they are stored; none is run.
"""

from __future__ import annotations

import os
import pathlib
import shutil

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app

from tools.documentation import interface, notebooks, pages

FOLDER = pathlib.Path("build/docs")


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Unknown arguments: {arguments[1:]}")
    shutil.rmtree(FOLDER, ignore_errors=True)
    pages.write_pages(FOLDER)
    interface.write_pages(FOLDER / "api")
    notebooks.write_pages(FOLDER / "notebooks")


if __name__ == "__main__":
    app.run(main)
