"""What README and results say: code that runs, tables that come from the files."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import pytest

import benchmarks.table
from examples import tables
from examples.few_shot.training import Setting

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_first_lines_say_which_nsl():
    first = " ".join(README.splitlines()[:6])
    assert "Neural Similarity Learning" in first
    assert "Neural Structured Learning" in first.replace("\n", " ")


@pytest.mark.long
def test_code_runs(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    result = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", block],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert (tmp_path / "served_model" / "1" / "saved_model.pb").exists()


def test_tables_come_from_the_files():
    for page in tables.pages():
        text = page.read_text()
        assert tables.with_tables(text) == text, f"make results: {page}"
    assert tables.results_readme() == (ROOT / "results" / "README.md").read_text()


def test_the_file_that_is_renewed_is_there():
    (named,) = re.findall(r"^ +rm (\S+)$", tables.INTRODUCTION, re.M)
    path = ROOT / named
    assert path.is_file()
    found = json.loads(path.with_name("setting.json").read_text())
    names = [field.name for field in dataclasses.fields(Setting)]
    assert Setting(**{name: found[name] for name in names}).name == path.parent.name


def test_all_that_was_measured_is_shown():
    paths = (ROOT / "results" / "benchmarks").glob("*.json")
    measured = {path.stem.split("_xla_")[0] for path in paths}
    assert measured <= {*benchmarks.table.GROUPS, benchmarks.table.MEMORY}


def test_links_lead_somewhere():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_commands_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([\w-]+)", README):
        if target != "and":
            assert re.search(rf"^(?:[\w-]+ )*{target}\b[ \w-]*:", makefile, re.M), target
