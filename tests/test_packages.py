"""The metadata of a release, and its Makefile. `make packages` tries what is built."""

import os
import re
import shutil
import subprocess
import tomllib

from helpers import ROOT

import nsl_keras

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_oldest_versions_are_those_of_the_metadata():
    extras = PROJECT["optional-dependencies"]
    named = ("tensorflow-cpu", "jax", "visualize", "demo", "examples")
    promised = [
        *PROJECT["dependencies"],
        *(each for name in named for each in extras[name]),
    ]
    lines = (ROOT / "requirements" / "oldest.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    for requirement in promised:
        name, lowest = re.match(r"([\w-]+)(?:>=([\d.]+)|\[)", requirement).groups()
        if name in tested:  # The others are what extras need, not what the package calls.
            parts = [[int(part) for part in v.split(".")] for v in (tested[name], lowest)]
            assert parts[0][: len(parts[1])] == parts[1], requirement
    for name in ("keras", "numpy", "absl-py", "tensorflow-cpu", "jax", "matplotlib"):
        assert name in tested


def test_version_is_the_same_everywhere():
    assert "version" in PROJECT["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", nsl_keras.__version__)
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {nsl_keras.__version__}\n" in citation


#: A Python that makes environments with itself inside; it fails where two pips run at once.
FAKE = """#!/bin/sh
case "$*" in
*"pip install"*) mkdir running && sleep 0.3 && rmdir running ;;
*"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
esac
"""


def test_make_installs_one_set_after_the_other(tmp_path):
    for name in ("Makefile", "pyproject.toml", "requirements/constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python3"
    python.write_text(FAKE)
    python.chmod(0o755)
    command = ["make", "-j", f"PYTHON={python}", "demo", "lint"]
    environment = {"PATH": os.environ["PATH"]}
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, env=environment)
    assert len(list((tmp_path / ".venv").glob(".installed-*"))) == 2
