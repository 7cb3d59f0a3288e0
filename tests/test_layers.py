"""All layers through the harness, and files of all models through a fresh process."""

import json

import learner_harness
import pytest
from helpers import IS_TENSORFLOW, run_python
from layer_cases import CASES
from layer_harness import (
    check_compiled,
    check_half_precision,
    check_layer,
    save_for_another_process,
)

#: The layers that `make test` compiles; `make test-long` takes the rest.
QUICK = ("conv2d_static_diagonal", "dense_dynamic_sphere")
#: What these compile, other cases compile too.
TWINS = (
    *("conv2d_without_identity", "conv2d_cnn", "sphere_conv2d"),
    *("neighbor_dictionary_given_values", "neighbor_dictionary_distance"),
    "meta_neighborhood_head_regression",
)

LOAD_ALL = """
import json, pathlib, sys
import numpy as np
import keras
import nsl_keras  # Registers the layers: without it the files do not load.
differences = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.keras")):
    arrays = dict(np.load(path.with_suffix(".npz")))
    expected = arrays.pop("outputs")
    inputs = list(arrays.values())
    model = keras.saving.load_model(path)
    outputs = model(tuple(inputs) if len(inputs) > 1 else inputs[0])
    difference = np.max(np.abs(keras.ops.convert_to_numpy(outputs) - expected))
    differences[path.stem] = float(difference / np.max(np.abs(expected)))
print(json.dumps(differences))
"""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layer(case, tmp_path):
    check_layer(case, tmp_path)


@pytest.mark.jax
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.name in QUICK else pytest.mark.long)
        for case in CASES
        if case.name not in TWINS
    ],
    ids=lambda case: case.name,
)
def test_compiled_layer(case, tmp_path):
    if not IS_TENSORFLOW:  # JAX refuses operations on mixed types while it traces them.
        check_half_precision(case, None, None, "float16", None)
    check_compiled(case, tmp_path)


@pytest.mark.long
def test_files_in_a_fresh_process(tmp_path):
    for case in CASES:
        save_for_another_process(case, tmp_path)
    for case in learner_harness.CASES:
        learner_harness.save_for_another_process(case, tmp_path)
    printed = run_python("-c", LOAD_ALL, tmp_path)
    differences = json.loads(printed.splitlines()[-1])
    assert set(differences) == {each.name for each in (*CASES, *learner_harness.CASES)}
    assert max(differences.values()) < 1e-6, differences
