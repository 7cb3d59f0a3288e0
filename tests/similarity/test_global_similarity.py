"""Global neural similarity: the authors' attention, and explicit matrices for the rest."""

import keras
import numpy as np
import pytest
from golden_files import DTYPES, Golden, gradients
from helpers import as_numpy, randomize
from keras import ops

from nsl_keras.layers import GlobalNeuralSimilarity2D
from nsl_keras.similarity.global_similarity import SIMILARITIES

IMAGES = np.random.default_rng(4).normal(size=(2, 4, 5, 8)).astype("float32")
POSITIONS = IMAGES.reshape(2, 20, 8)


def make_layer(similarity, **options):
    """A built layer with weights that are nowhere zero."""
    layer = GlobalNeuralSimilarity2D(similarity=similarity, **options)
    layer.build(IMAGES.shape)
    return randomize(layer, 0.5)


def explicit_matrices(layer):
    """`M` in full, one an example, and what is added: `M_G X = M X + offset`."""
    identity, offset = np.eye(20), np.zeros(POSITIONS.shape)
    if layer.similarity == "diagonal":
        matrices = np.diag(as_numpy(layer.similarity_parameters))
    elif layer.similarity == "unconstrained":
        matrices = as_numpy(layer.similarity_parameters)
    elif layer.similarity == "predicted_mask":
        predicted = layer.mask_output(ops.relu(layer.mask_hidden(IMAGES)))
        matrices = identity * (1 + as_numpy(predicted).reshape(2, 1, 20))
    else:
        first = as_numpy(layer.query(POSITIONS))
        second = as_numpy(layer.key(POSITIONS))
        if layer.similarity == "attention":
            matrices = first @ np.swapaxes(second, 1, 2)
        else:
            exponentials = np.exp(np.maximum(first, 0) @ np.swapaxes(second, 1, 2))
            attention = exponentials / exponentials.sum(axis=-1, keepdims=True)
            matrices = identity
            offset = as_numpy(layer.gamma) * attention @ as_numpy(layer.value(POSITIONS))
    return np.broadcast_to(matrices, (2, 20, 20)), offset


class AuthorsL2(keras.regularizers.Regularizer):
    """The authors' L2 of 5e-4, which counts half the squares."""

    def __call__(self, kernel):
        return 2.5e-4 * ops.sum(ops.square(kernel))


def test_authors_attention():
    dtype = DTYPES[0]
    golden = Golden("nsl_gns_attention")
    layer = GlobalNeuralSimilarity2D(
        similarity="softmax_attention", regularizer=AuthorsL2(), dtype=dtype
    )
    layer.build(golden["in.x"].shape)
    assert float(layer.gamma) == 0
    variables = {
        "att_first.W": layer.query.kernel,
        "att_second.W": layer.key.kernel,
        "att_third.W": layer.value.kernel,
        "gamma": layer.gamma,
    }
    for name, variable in variables.items():
        variable.assign(np.reshape(golden[f"w.{name}"], variable.shape))
    assert len(layer.losses) == 3
    golden.check("out64.reg_loss", sum(layer.losses), dtype)
    x = ops.convert_to_tensor(golden["in.x"], dtype=dtype)
    golden.check("out64.y", layer(x), dtype)
    cotangent = ops.cast(golden["ct.y"], dtype)
    found = gradients(
        lambda x: ops.sum(layer(x) * cotangent), [x], list(variables.values())
    )
    for name, gradient in zip(("x", *variables), found, strict=True):
        key = f"grad64.y.{name}"
        golden.check(key, ops.reshape(gradient, golden[key].shape), dtype)


@pytest.mark.parametrize("sphere", [True, False])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_is_its_matrix_times_the_feature_map(similarity, sphere):
    layer = make_layer(similarity, sphere=sphere)
    matrices, offset = explicit_matrices(layer)
    expected = (matrices @ POSITIONS + offset).reshape(IMAGES.shape)
    received = as_numpy(layer(IMAGES))
    assert np.max(np.abs(received - IMAGES)) > 0.1
    tolerance = 1e-5 * np.max(np.abs(expected))
    np.testing.assert_allclose(received, expected, atol=tolerance)


@pytest.mark.parametrize(
    ("similarity", "shapes"),
    [
        ("diagonal", [(20,)]),
        ("unconstrained", [(20, 20)]),
        ("predicted_mask", [(3, 3, 8, 64), (3, 3, 64, 1)]),
        ("attention", [(8, 8), (8, 8)]),
        ("softmax_attention", [(), (8, 1), (8, 1), (8, 8)]),
    ],
)
def test_weights_penalties_and_start(similarity, shapes):
    layer = GlobalNeuralSimilarity2D(similarity=similarity, regularizer="l2")
    layer.build(IMAGES.shape)
    assert [tuple(weight.shape) for weight in layer.weights] == shapes
    assert len(layer.losses) == len([shape for shape in shapes if shape])
    if similarity != "attention":
        np.testing.assert_allclose(as_numpy(layer(IMAGES)), IMAGES, atol=1e-6)


@pytest.mark.parametrize("similarity", ["attention", "softmax_attention"])
def test_bare_attention_does_not_overflow_in_half_precision(similarity):
    layer = GlobalNeuralSimilarity2D(similarity, sphere=False, dtype="mixed_float16")
    images = ops.cast(8 * np.abs(IMAGES) + 8, "float16")
    layer.build(images.shape)
    # The sum over positions, or a score, is above the largest float16, 65504.
    for part, value in (
        (layer.query, 5e-5 if similarity == "attention" else 10.0),
        (layer.key, 10.0),
    ):
        part.kernel.assign(np.full(part.kernel.shape, value))
    outputs = layer(images)
    assert keras.backend.standardize_dtype(outputs.dtype) == "float16"
    assert np.all(np.isfinite(as_numpy(outputs)))


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"similarity": "full"}, (), r"`similarity` must be one of .*similarity='full'"),
        ({"sphere": "no"}, (), "`sphere` must be True or False.*'no'"),
        ({"data_format": "last"}, (), r"`data_format` must be one of .*'last'"),
        ({}, (None, None, 5, 8), r"known at the height and width.*\(None, None, 5, 8\)"),
        ({"similarity": "unconstrained"}, (None, 4, None, 8), r"known at the height"),
        ({}, (None, 4, 5, None), r"`input_shape` must be known at the channel axis"),
    ],
    ids=str,
)
def test_errors(options, shape, message):
    with pytest.raises(ValueError, match=message):
        GlobalNeuralSimilarity2D(**options).build(shape)
    with pytest.raises(ValueError, match=r"expected axis 1 .* value 4"):
        make_layer("diagonal")(IMAGES[:, :3])
