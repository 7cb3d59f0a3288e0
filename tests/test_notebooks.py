import json
import pathlib
import runpy

import jupytext
import pytest
from helpers import ROOT

NOTEBOOKS = ROOT / "examples" / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.py"))


def read_notebook(path):
    return json.loads(path.read_text(encoding="utf-8"))


def joined(text):
    """Notebooks store a text as one string or as a list of lines."""
    return text if isinstance(text, str) else "".join(text)


def test_each_notebook_has_its_script():
    assert NAMES
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_made_from_its_script(name):
    script = NOTEBOOKS / f"{name}.py"
    notebook = read_notebook(script.with_suffix(".ipynb"))

    expected = [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells]
    found = [(cell["cell_type"], joined(cell["source"])) for cell in notebook["cells"]]

    assert found == expected, "Make it anew: python -m tools.documentation.notebooks"
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


@pytest.mark.parametrize("name", NAMES)
def test_notebook_stores_what_it_shows(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = read_notebook(path)

    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size < 2**20
    # No folder of the machine it ran on.
    assert str(pathlib.Path.home()) + "/" not in json.dumps(notebook)
    assert f"notebooks/{name}.ipynb" in joined(notebook["cells"][0]["source"])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Those of other packages are not ours.
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name, tmp_path, monkeypatch, eager):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NSL_KERAS_SHORT", "1")
    runpy.run_path(str(NOTEBOOKS / f"{name}.py"))
