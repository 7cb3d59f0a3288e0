import pathlib
import runpy

import jupytext
import nbformat
import pytest
from helpers import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@each_notebook
def test_notebook_stores_what_it_shows(path):
    notebook = nbformat.read(path, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size < 2**20
    # No folder of the machine it ran on.
    assert str(pathlib.Path.home()) + "/" not in path.read_text()
    assert f"notebooks/{path.name}" in notebook.cells[0].source
    assert notebook.metadata.kernelspec.name == "python3"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Those of other packages are not ours.
@each_notebook
def test_notebook_runs(path, tmp_path, monkeypatch, eager, large_batches):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSL_KERAS_SHORT", "1")
    script = tmp_path / "notebook.py"
    script.write_text(jupytext.writes(jupytext.read(path), "py:percent"))
    runpy.run_path(str(script))
