"""All layers through the harness, and files of all models through a fresh process."""

import json

import learner_harness
import numpy as np
import pytest
from helpers import IS_TENSORFLOW, as_numpy, run_python
from layer_cases import CASES
from layer_harness import check_compiled, check_half_precision, check_layer

#: The layers that `make test` compiles; `make test-long` takes the rest.
QUICK = ("conv2d_static_diagonal", "dense_dynamic_sphere")
#: What these compile, other cases compile too.
TWINS = "conv2d_cnn", "neighbor_dictionary_distance", "meta_neighborhood_head_regression"

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
    made = {case.name: (case.perturbed_model(), case.inputs()) for case in CASES}
    made |= {case.name: case.built()[:2] for case in learner_harness.CASES}
    for name, (model, inputs) in made.items():
        model.save(tmp_path / f"{name}.keras")
        arrays = inputs if isinstance(inputs, tuple) else (inputs,)
        np.savez(tmp_path / f"{name}.npz", *arrays, outputs=as_numpy(model(inputs)))
    printed = run_python("-c", LOAD_ALL, tmp_path)
    differences = json.loads(printed.splitlines()[-1])
    assert set(differences) == set(made)
    assert max(differences.values()) < 1e-6, differences
