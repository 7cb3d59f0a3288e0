"""README: its code runs, its commands exist. `test_documentation.py` checks the links."""

import re

import keras
import numpy as np
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
    first, *blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    names = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert (tmp_path / "served_model" / "1" / "saved_model.pb").exists()

    # The first lines begin from a trained model.
    names["trained_model"] = keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )
    exec(compile(first, "README.md", "exec"), names)
    images = names["images"]
    np.testing.assert_allclose(names["plain"](images), names["similar"](images), atol=1e-5)
    assert all(
        type(layer).__module__.startswith("keras") for layer in names["plain"].layers
    )


def test_commands_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([\w-]+)", README):
        if target != "and":
            assert re.search(rf"^(?:[\w-]+ )*{target}\b[ \w-]*:", makefile, re.M), target
