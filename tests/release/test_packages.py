"""What is released: a wheel that suffices, and oldest versions that are those promised."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

import nsl_keras

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_oldest_versions_are_those_of_the_metadata():
    promised = [
        *PROJECT["dependencies"],
        *(
            requirement
            for extra in ("tensorflow-cpu", "jax", "visualize", "examples")
            for requirement in PROJECT["optional-dependencies"][extra]
        ),
    ]
    lines = (ROOT / "requirements" / "oldest.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    for requirement in promised:
        name, lowest = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
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


@pytest.mark.long
def test_wheel_runs_away_from_the_repository(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT / "nsl_keras", source / "nsl_keras")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        + ["--wheel-dir", tmp_path, source],
        check=True,
        capture_output=True,
        timeout=200,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        assert {name.split("/")[0].split("-")[0] for name in file.namelist()} == {
            "nsl_keras"
        }
        file.extractall(tmp_path / "site-packages")
    result = subprocess.run(
        [sys.executable, HERE / "smoke.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site-packages")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert f"nsl_keras {nsl_keras.__version__} trains" in result.stdout
