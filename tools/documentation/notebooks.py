"""Runs the notebooks, stores what they show, and makes pages of them.

    python -m tools.documentation.notebooks               # all: some ten minutes
    python -m tools.documentation.notebooks --only=fold   # some minutes

Each runs in a new kernel, and is stored with its outputs and pictures.
"""

from __future__ import annotations

import base64
import io
import os
import pathlib
import re
import tempfile
import time

import nbformat
from absl import app, flags
from nbclient import NotebookClient
from PIL import Image

from tools.documentation import pages

FLAGS = flags.FLAGS
NOTEBOOKS = pages.ROOT / pages.NOTEBOOKS
#: Set, notebooks train for a few steps only, to see that they run.
SHORT = "NSL_KERAS_SHORT"


def names() -> list[str]:
    """Returns the names of the notebooks."""
    return sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def executed(name: str) -> nbformat.NotebookNode:
    """Returns a notebook with the outputs of a new run.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell fails.
    """
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    before = os.environ.get("PYTHONPATH", "")
    # This checkout, installed or not: else the notebook would install the package.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(pages.ROOT), before]))
    try:
        with tempfile.TemporaryDirectory() as folder:
            resources = {"metadata": {"path": folder}}
            NotebookClient(notebook, timeout=900, resources=resources).execute()
    finally:
        os.environ["PYTHONPATH"] = before
    return without_traces(notebook)


def without_traces(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Takes out what changes from run to run: times, identifiers, streams in pieces."""
    notebook.metadata.pop("widgets", None)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    return notebook


def _joined(outputs: list) -> list:
    """Printed text in one piece, without what libraries log, and small pictures."""
    joined: list = []
    for output in outputs:
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = _small(output.data["image/png"])
        if output.output_type == "stream" and output.name == "stderr":
            continue
        if joined and output.output_type == joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def _small(picture: str) -> str:
    """A picture of at most 800 pixels to a side, in 256 colors."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.thumbnail((800, 800))
    file = io.BytesIO()
    image.quantize(256).save(file, "png", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def write_pages(folder: pathlib.Path) -> None:
    """Writes a Markdown page for each notebook as it is stored, pictures beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names():
        notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        (folder / f"{name}.md").write_text(_page(name, notebook, folder))


def _page(name: str, notebook: nbformat.NotebookNode, folder: pathlib.Path) -> str:
    parts = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(pages.made(f"{pages.NOTEBOOKS}/{name}.ipynb", cell.source))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for place, output in enumerate(cell.outputs):
            parts.append(_shown(output, folder, f"{name}_{number}_{place}.png"))
    return "\n\n".join(part for part in parts if part) + "\n"


def _shown(output: nbformat.NotebookNode, folder: pathlib.Path, picture: str) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        (folder / picture).write_bytes(base64.b64decode(data["image/png"]))
        return f"![]({picture})"
    text = output.get("text") or data.get("text/plain", "")
    # Progress is printed with backspaces, and colors with escapes.
    text = re.sub(r"\x1b\[[\d;]*m|.*\x08", "", text).strip("\n")
    return f"```text\n{text}\n```" if text else ""


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Unknown arguments: {arguments[1:]}")
    for name in FLAGS.only or names():
        start = time.perf_counter()
        nbformat.write(executed(name), NOTEBOOKS / f"{name}.ipynb")
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    flags.DEFINE_multi_enum("only", [], names(), "Which notebooks; all if none is given.")
    app.run(main)
