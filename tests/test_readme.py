"""README: its code runs, its links and commands exist."""

import re

import pytest
from helpers import ROOT

README = (ROOT / "README.md").read_text()


def test_first_lines_say_which_nsl():
    first = " ".join(README.splitlines()[:6])
    assert "Neural Similarity Learning" in first
    assert "Neural Structured Learning" in first


@pytest.mark.long
def test_code_runs(tmp_path, monkeypatch, eager):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert (tmp_path / "served_model" / "1" / "saved_model.pb").exists()


def test_links_lead_somewhere():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_commands_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([\w-]+)", README):
        if target != "and":
            assert re.search(rf"^(?:[\w-]+ )*{target}\b[ \w-]*:", makefile, re.M), target
