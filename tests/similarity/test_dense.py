"""The dense layer with a neural similarity, against Keras's own and against the formula."""

import keras
import numpy as np
import pytest
from finite_differences import check_gradients
from golden_files import DTYPES
from keras import ops
from similarity_layers import (
    DYNAMIC_SIMILARITIES,
    SIMILARITIES,
    TOLERANCES,
    assert_close,
    assert_equal,
    identity_parameters,
    randomize,
    static_matrix,
    to_matrix,
)

from nsl_keras import similarities
from nsl_keras.layers import NeuralSimilarityDense

FEATURES, UNITS = 12, 5
INPUTS = np.random.default_rng(5).normal(size=(2, 3, FEATURES))
STATIC_SIMILARITIES = [name for name in SIMILARITIES if name != "full"]
BLOCK_SIZES = (None, 4)

each_block_size = pytest.mark.parametrize("block_size", BLOCK_SIZES)


def inputs(dtype="float32"):
    return ops.convert_to_tensor(INPUTS, dtype=dtype)


def made(similarity, **options):
    """A built layer with random weights."""
    similarity = SIMILARITIES.get(similarity, similarity)
    layer = NeuralSimilarityDense(UNITS, similarity=similarity, **options)
    layer.build((None, None, FEATURES))
    randomize(layer)
    return layer


def in_blocks(matrix):
    """`diag(M_s, ..., M_s)` of all features, from one block with any leading axes."""
    return np.kron(np.eye(FEATURES // matrix.shape[-1]), matrix)


def by_formula(layer, matrix):
    """`W^T M x + b`, for one matrix, or one a vector."""
    kernel, bias = (
        np.asarray(ops.convert_to_numpy(v), "float64") for v in (layer.kernel, layer.bias)
    )
    return np.einsum("io,...ij,...j->...o", kernel, matrix, INPUTS) + bias


@pytest.mark.parametrize(
    ("similarity", "dtype"),
    [
        *((each, DTYPES[0]) for each in STATIC_SIMILARITIES),
        *(("unconstrained", dtype) for dtype in DTYPES[1:]),
    ],
)
@each_block_size
def test_static_formula(similarity, block_size, dtype):
    layer = made(similarity, block_size=block_size, dtype=dtype)
    matrix = static_matrix(layer)
    assert matrix.shape[-1] == (block_size or FEATURES)
    assert_close(layer.similarity_matrix, matrix, TOLERANCES[dtype])
    expected = by_formula(layer, in_blocks(matrix))
    assert_close(layer(inputs(dtype)), expected, TOLERANCES[dtype])
    assert_close(layer(inputs(dtype)[:, 0]), expected[:, 0], TOLERANCES[dtype])
    kernel = np.asarray(ops.convert_to_numpy(layer.kernel), "float64")
    assert_close(layer.equivalent_kernel, in_blocks(matrix).T @ kernel, TOLERANCES[dtype])


def test_learned_shape_masks_features_of_every_block():
    layer = made(similarities.Unconstrained(learn_shape=True), block_size=4)
    layer.bilinear_form.shape_parameters.assign([1.0, 0.4, 0.6, 0.0])
    masked = np.diag([1.0, 0.0, 1.0, 0.0]) @ static_matrix(layer)
    assert_close(layer(inputs()), by_formula(layer, in_blocks(masked)), 1e-5)
    assert_equal(layer.learned_shape, [1, 0, 1, 0])


@pytest.mark.jax
def test_an_empty_batch():
    layer = NeuralSimilarityDense(3, predictor="sphere")
    assert tuple(layer(np.zeros((0, 6), "float32")).shape) == (0, 3)


@pytest.mark.parametrize(
    ("similarity", "dtype"),
    [
        *((each, DTYPES[0]) for each in DYNAMIC_SIMILARITIES),
        *(("unconstrained", dtype) for dtype in DTYPES[1:]),
    ],
)
@each_block_size
def test_dynamic_formula(similarity, block_size, dtype):
    layer = made(similarity, block_size=block_size, predictor="cnn", dtype=dtype)
    rows = ops.reshape(inputs(dtype), (-1, FEATURES))
    prediction = ops.convert_to_numpy(layer.bilinear_form.network(rows)).astype("float64")
    identity = identity_parameters(layer.similarity, block_size or FEATURES)
    parameters = prediction.reshape(2, 3, *identity.shape) + identity
    matrices = to_matrix(layer.similarity, parameters)
    assert np.ptp(matrices, axis=(0, 1)).max() > 0.1
    expected = by_formula(layer, in_blocks(matrices))
    assert_close(layer(inputs(dtype)), expected, 10 * TOLERANCES[dtype])
    assert_close(layer(inputs(dtype)[:, 0]), expected[:, 0], 10 * TOLERANCES[dtype])


@pytest.mark.parametrize("similarity", STATIC_SIMILARITIES)
def test_gradients_of_the_static_layer(similarity):
    dtype, block_size = DTYPES[0], 4
    layer = made(similarity, block_size=block_size, dtype=dtype)
    # The sparse gradient goes past the mask on purpose; a Cholesky factor is squared; the
    # orthogonal one is checked in small steps, in test_features.py.
    curved = similarity.startswith("sparse") or similarity == "orthogonal"
    skip = ("similarity",) if curved else ()
    tolerance = {"float64": 1e-8, "float32": 1e-3}[dtype]
    check_gradients(layer, inputs(dtype), dtype, 1e-2, tolerance, skip=skip)


@pytest.mark.skipif("float64" not in DTYPES, reason="needs float64")
@pytest.mark.parametrize(
    ("similarity", "kind", "training"),
    [
        ("diagonal", "sphere", True),
        ("unconstrained", "full_sphere", False),
        ("symmetric", "cnn", True),
    ],
)
def test_gradients_of_the_dynamic_layer(similarity, kind, training):
    layer = made(similarity, block_size=3, predictor=kind, dtype="float64")
    check_gradients(layer, inputs("float64"), "float64", 1e-6, 1e-5, training)


@pytest.mark.parametrize(
    "predictor",
    ["sphere", "full_sphere", keras.layers.Dense(FEATURES, kernel_initializer="zeros")],
    ids=["sphere", "full_sphere", "custom"],
)
def test_masked_vectors_change_no_statistics(predictor):
    layer = NeuralSimilarityDense(UNITS, predictor=predictor)
    model = keras.Sequential([keras.Input((None, FEATURES)), keras.layers.Masking(), layer])
    randomize(layer)
    weights = model.get_weights()
    found = []
    for padding in (0, 20):
        model.set_weights(weights)
        given = np.pad(INPUTS, [(0, 0), (0, padding), (0, 0)])
        outputs = ops.convert_to_numpy(model(given, training=True))
        found.append([outputs[:, : INPUTS.shape[1]], *model.get_weights()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@each_block_size
@pytest.mark.parametrize("dtype", [DTYPES[0], "mixed_bfloat16", "mixed_float16"])
def test_fold(dtype, block_size):
    layer = made("symmetric", block_size=block_size, activation="tanh", dtype=dtype)
    outputs = layer(inputs())
    plain = layer.fold()
    assert type(plain) is keras.layers.Dense
    assert_equal(layer(inputs()), outputs)
    # Bit for bit, in half precision too: the kernel is rounded once, as Dense does.
    assert_equal(plain(inputs()), outputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "`block_size` must be a positive integer"),
        ({"block_size": 5}, "`block_size` must be a divisor of the 12 feat.*=5"),
        ({"similarity": "full"}, "`similarity` must be shared .* similarity='Full'"),
        (
            {"predictor": keras.layers.Dense(7)},
            r"`predictor` must return the 12 parameters .*shape \(None, 7\)",
        ),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        NeuralSimilarityDense(UNITS, **options).build((None, 12))
