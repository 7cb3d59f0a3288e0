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
from nbclient import NotebookClient

source, executed, folder = sys.argv[1:]
notebook = nbformat.read(source, as_version=4)
NotebookClient(notebook, resources={"metadata": {"path": folder}}).execute()
nbformat.write(notebook, executed)
"""


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

    command = f"jupytext --to ipynb {script.relative_to(REPOSITORY).as_posix()}"
    assert found == expected, f"Make the notebook anew: {command}"
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        # Stored outputs would go stale, and make every difference unreadable.
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs_and_shows_pictures(name, tmp_path):
    executed = tmp_path / "executed.ipynb"
    folder = tmp_path / "working_directory"
    folder.mkdir()
    environment = {
        **os.environ,
        # This checkout, installed or not: else the notebook would install the package.
        "PYTHONPATH": str(REPOSITORY),
        # This environment's kernel, and no settings of whoever runs the tests.
        "JUPYTER_PREFER_ENV_PATH": "1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }

    run = subprocess.run(
        [sys.executable, "-c", EXECUTE, NOTEBOOKS / f"{name}.ipynb", executed, folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert run.returncode == 0, run.stderr
    outputs = [
        output
        for cell in read_notebook(executed)["cells"]
        for output in cell.get("outputs", [])
    ]
    assert not [output for output in outputs if output["output_type"] == "error"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 2
