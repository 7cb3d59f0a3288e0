import json
import os
import pathlib
import subprocess
import sys

import jupytext
import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = REPOSITORY / "examples" / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.py"))

# In a process of its own: the warnings of the Jupyter packages are not ours to turn into
# errors, and a notebook shall not depend on what other tests left behind.
EXECUTE = """
import sys

import nbformat
from examples.documentation import notebooks

name, executed = sys.argv[1:]
nbformat.write(notebooks.executed(name), executed)
"""


def read_notebook(path):
    return json.loads(path.read_text(encoding="utf-8"))


def joined(text):
    """Notebooks store a text as one string or as a list of lines."""
    return text if isinstance(text, str) else "".join(text)


def check_outputs(notebook):
    """There are pictures, and no error."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2


def test_each_notebook_has_its_script():
    assert NAMES
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_notebook_is_made_from_its_script(name):
    script = NOTEBOOKS / f"{name}.py"
    notebook = read_notebook(script.with_suffix(".ipynb"))

    expected = [(cell.cell_type, cell.source) for cell in jupytext.read(script).cells]
    found = [(cell["cell_type"], joined(cell["source"])) for cell in notebook["cells"]]

    assert found == expected, "Make the notebook anew: make notebooks"
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


@pytest.mark.parametrize("name", NAMES)
def test_notebook_stores_what_it_shows(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = read_notebook(path)

    check_outputs(notebook)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert path.stat().st_size < 3 * 2**20
    # A machine's folders are nobody's business.
    assert str(pathlib.Path.home()) + "/" not in json.dumps(notebook)
    assert f"notebooks/{name}.ipynb" in joined(notebook["cells"][0]["source"])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name, tmp_path):
    executed = tmp_path / "executed.ipynb"
    environment = {
        **os.environ,
        "NSL_KERAS_SHORT": "1",
        "PYTHONPATH": str(REPOSITORY),
        # This environment's kernel, and no settings of whoever runs the tests.
        "JUPYTER_PREFER_ENV_PATH": "1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }

    run = subprocess.run(
        [sys.executable, "-c", EXECUTE, name, executed],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert run.returncode == 0, run.stderr
    check_outputs(read_notebook(executed))
