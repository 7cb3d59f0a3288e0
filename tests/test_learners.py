"""Every learner through the harness."""

import subprocess
import sys

import learner_harness
import pytest

CASES = {case.name: case for case in learner_harness.CASES}


@pytest.mark.parametrize("name", CASES)
def test_learner(name, tmp_path):
    learner_harness.check_learner(CASES[name], tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        each
        if each in ("proto", "centroid")
        else pytest.param(each, marks=pytest.mark.long)
        for each in CASES
    ],
)
def test_compiled(name, tmp_path):
    learner_harness.check_compiled(CASES[name], tmp_path)


SCRIPT = """
import pathlib
import sys
import keras
import numpy as np
import nsl_keras

for path in sorted(pathlib.Path(sys.argv[1]).glob("*.keras")):
    arrays = dict(np.load(path.with_suffix(".npz")))
    outputs = arrays.pop("outputs")
    inputs = tuple(arrays[f"arr_{place}"] for place in range(len(arrays)))
    model = keras.saving.load_model(path)
    found = model(inputs if len(inputs) > 1 else inputs[0])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(found), outputs, atol=1e-6)
    print(path.stem)
"""


@pytest.mark.long
def test_files_in_a_fresh_process(tmp_path):
    for case in CASES.values():
        learner_harness.save_for_another_process(case, tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert set(result.stdout.split()) == set(CASES)
