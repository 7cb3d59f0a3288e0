"""All layers through the harness, and files of all models through a fresh process."""

import keras
import learner_harness
import numpy as np
import pytest
from helpers import IS_TENSORFLOW, as_numpy, run_python
from layer_cases import CASES
from layer_harness import check_compiled, check_half_precision, check_layer

import nsl_keras

#: The layers that `make test` compiles; `make test-long` takes the rest.
QUICK = ("conv2d_static_diagonal", "dense_dynamic_sphere")
#: What these compile, other cases compile too.
TWINS = (
    *("conv2d_static_groups", "conv2d_static_full", "conv2d_shared", "conv3d_static"),
    *("conv2d_transpose_static", "depthwise_sphere", "global_diagonal"),
    *("dense_static_blocks", "dense_dynamic_cnn_blocks", "simple_rnn_static"),
    *("sphere_dense", "global_predicted_mask", "cosine_dense", "neighbor_dictionary"),
    *("neighbor_dictionary_distance", "meta_neighborhood_head_regression"),
)

#: Files that a fresh process loads; for other layers it asks whether they are registered.
NAMES = "conv2d_shared", "lstm_dynamic_cnn_dropout", "meta_neighborhood_head_tape"
FILES = [case for case in CASES if case.name in NAMES]

LOAD_ALL = """
import pathlib, sys
import numpy as np
import keras
import nsl_keras  # Registers the layers: without it the files do not load.
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.keras")):
    arrays = dict(np.load(path.with_suffix(".npz")))
    expected = arrays.pop("outputs")
    inputs = list(arrays.values())
    model = keras.saving.load_model(path)
    outputs = model(tuple(inputs) if len(inputs) > 1 else inputs[0])
    np.testing.assert_allclose(outputs, expected, atol=1e-5)
for name in sys.argv[2:]:
    assert keras.saving.get_registered_object(name), name
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
    kinds = [each for each in vars(nsl_keras.layers).values() if isinstance(each, type)]
    names = [keras.saving.get_registered_name(kind) for kind in kinds]
    assert len(names) > 20
    made = [(each.name, each.perturbed_model(), each.inputs()) for each in FILES]
    proto = learner_harness.CASES[0]
    for name, model, inputs in [*made, (proto.name, *proto.built()[:2])]:
        model.save(tmp_path / f"{name}.keras")
        arrays = inputs if isinstance(inputs, tuple) else (inputs,)
        np.savez(tmp_path / f"{name}.npz", *arrays, outputs=as_numpy(model(inputs)))
    run_python("-c", LOAD_ALL, tmp_path, *names)
