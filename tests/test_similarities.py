"""Similarities by name and by file, their structure, and their shortcuts."""

import keras
import numpy as np
import pytest
from helpers import DTYPES, assert_close, assert_equal, gradients, randomize, reloaded
from keras import ops
from layer_cases import built, identity_parameters, to_matrix

from nsl_keras import similarities
from nsl_keras.backend import compiled
from nsl_keras.layers import NeuralSimilarityConv2D

RNG = np.random.default_rng(8)
each_kind = pytest.mark.parametrize("name", similarities.KINDS)


def random(*shape, dtype="float32"):
    return ops.convert_to_tensor(RNG.normal(size=shape).astype(dtype))


def random_parameters(similarity, size, *leading, dtype="float32"):
    shape = np.shape(similarity.parameters_from(np.eye(size)))
    return random(*leading, *shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@each_kind
def test_matrix_of_parameters_and_back(name, dtype):
    similarity = similarities.get(name)
    parameters = random_parameters(similarity, 6, dtype=dtype)
    matrix = similarity.matrix(parameters, 6)
    assert tuple(matrix.shape) == (6, 6)
    assert keras.backend.standardize_dtype(matrix.dtype) == dtype
    tolerance = {"float64": 1e-12, "float32": 1e-5}[dtype]
    assert_close(matrix, to_matrix(similarity, parameters), tolerance)
    # Not the same parameters everywhere, but the same matrix.
    again = ops.cast(similarity.parameters_from(ops.convert_to_numpy(matrix)), dtype)
    assert again.shape == parameters.shape
    assert_close(similarity.matrix(again, 6), matrix, tolerance)
    identity = similarity.parameters_from(np.eye(9, dtype=dtype))
    assert_equal(identity, identity_parameters(similarity, 9))
    assert_equal(similarity.matrix(ops.cast(identity, dtype), 9), np.eye(9))


@keras.saving.register_keras_serializable("tests")
class Lazy(similarities.Similarity):
    """`M = (1 - rate) I + rate A`: part of the identity stays."""

    def __init__(self, rate=0.5, **kwargs):
        super().__init__(**kwargs)
        self.rate = rate

    def get_config(self):
        return {**super().get_config(), "rate": self.rate}

    def parameters_from(self, matrix):
        return (matrix - (1 - self.rate) * np.eye(len(matrix))) / self.rate

    def matrix(self, parameters, size):
        identity = ops.eye(size, dtype=parameters.dtype)
        return (1 - self.rate) * identity + self.rate * parameters


def test_a_custom_similarity(tmp_path):
    layers = [
        NeuralSimilarityConv2D(4, 3, similarity=Lazy(0.25, learn_shape=True)),
        NeuralSimilarityConv2D(4, 3, similarity=Lazy(), predictor="cnn"),
    ]
    model = keras.Sequential([keras.Input((8, 8, 2)), *layers])
    assert_close(layers[0].similarity_matrix, np.eye(9), 1e-6)
    randomize(model)
    images = random(2, 8, 8, 2)
    assert_close(layers[0].fold()(images), layers[0](images), 1e-5)
    loaded = reloaded(model, tmp_path)
    assert_equal(loaded(images), model(images))
    assert [layer.similarity.rate for layer in loaded.layers] == [0.25, 0.5]
    assert [each.similarity.learn_shape for each in loaded.layers] == [True, False]


def from_initial_matrix(matrix, dtype="float32"):
    layer = NeuralSimilarityConv2D(
        *(2, (2, 3)),
        similarity=similarities.PositiveSemidefinite(
            initializer=keras.initializers.Constant(matrix)
        ),
        dtype=dtype,
    )
    layer.build((None, 5, 5, 2))
    return layer


GRAM = RNG.normal(size=(6, 3))


@pytest.mark.parametrize(
    "matrix",
    [RNG.normal(size=(6, 8)), GRAM, np.diag([2.0, 0, 1, 0, 0, 3])],
    ids=["regular", "rank_3", "diagonal_with_zeros"],
)
def test_positive_semidefinite_starts_from_any_such_matrix(matrix):
    matrix = matrix @ matrix.T
    assert_close(from_initial_matrix(matrix).similarity_matrix, matrix, 1e-5)


def test_positive_semidefinite_starts_in_half_precision():
    """Rounded to it a matrix of rank 3 would have eigenvalues below zero."""
    matrix = GRAM @ GRAM.T
    layer = from_initial_matrix(matrix, "bfloat16")
    assert layer.bilinear_form.similarity_parameters.dtype == "bfloat16"
    found = ops.convert_to_numpy(ops.cast(layer.similarity_matrix, "float32"))
    np.testing.assert_allclose(found, matrix, atol=0.05 * matrix.max())


def test_sparse_ties_go_to_the_entries_nearest_to_the_middle():
    for parameters in (np.eye(9), np.ones((9, 9)), -np.ones((9, 9))):
        for jit_compile in (False, True):
            function = compiled(lambda p: similarities.Sparse(1).matrix(p, 9), jit_compile)
            matrix = function(ops.convert_to_tensor(parameters, "float32"))
            assert np.argwhere(ops.convert_to_numpy(matrix)).tolist() == [[4, 4]]
    # A row of three taps: the middle with itself, then pairs of it with a neighbor.
    parameters = np.ones((3, 3), "float32")
    matrix = ops.convert_to_numpy(similarities.Sparse(5).matrix(parameters, 3))
    np.testing.assert_array_equal(matrix, [[0, 1, 0], [1, 1, 1], [0, 1, 0]])
    # A larger entry is kept, however far it is; the ties come after it.
    parameters[2, 0] = -1.5
    matrix = ops.convert_to_numpy(similarities.Sparse(2).matrix(parameters, 3))
    np.testing.assert_array_equal(matrix, [[0, 0, 0], [0, 1, 0], [-1.5, 0, 0]])


def test_gradient_of_every_sparse_entry_is_that_of_the_matrix():
    sparse = similarities.Sparse(1)
    layer, inputs = built("conv2d", kernel_size=2, similarity=sparse)
    unconstrained, _ = built("conv2d", kernel_size=2, similarity="unconstrained")
    unconstrained.set_weights(layer.get_weights())
    unconstrained.bilinear_form.similarity_parameters.assign(layer.similarity_matrix)
    cotangent = random(*layer.compute_output_shape(inputs.shape))
    received, expected = (
        gradients(
            lambda inputs: ops.sum(ops.square(each(inputs) - cotangent)),
            [inputs],
            [each.bilinear_form.similarity_parameters],
        )
        for each in (layer, unconstrained)
    )
    for ours, theirs in zip(received, expected, strict=True):
        assert_close(ours, theirs, 1e-5)
    assert (
        np.count_nonzero(ops.convert_to_numpy(received[1])) == layer.bilinear_form.taps**2
    )


def layer_with(similarity):
    """Makes and builds a layer with four taps."""
    NeuralSimilarityConv2D(3, 2, similarity=similarity).build((None, 6, 6, 1))


ZEROS = keras.saving.serialize_keras_object(keras.initializers.Zeros())
KNOWN = ", ".join(repr(name) for name in similarities.KINDS)
UNKNOWN = rf"`similarity` must be one of {KNOWN}.*, or a `.*Received: similarity="
NOT_SEMIDEFINITE = "`initializer` must be one that gives a symmetric, positive semidef"
SMALL_NEGATIVE = GRAM @ GRAM.T - 0.01 * np.eye(6)


@pytest.mark.parametrize(
    ("call", "argument", "message"),
    [
        *((similarities.get, each, UNKNOWN) for each in ("diag", ZEROS)),
        (from_initial_matrix, -np.eye(6), NOT_SEMIDEFINITE),
        (from_initial_matrix, np.eye(6) + np.eye(6, k=1), NOT_SEMIDEFINITE),
        (from_initial_matrix, SMALL_NEGATIVE, NOT_SEMIDEFINITE),
        (similarities.Sparse, 0, "`nonzeros` must be a positive integer"),
        (layer_with, similarities.Sparse(17), "`nonzeros` must be at most 16, .*=17"),
    ],
)
def test_errors(call, argument, message):
    with pytest.raises(ValueError, match=message):
        call(argument)
