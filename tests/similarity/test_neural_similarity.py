"""What all layers with a neural similarity share: weights, their start and training."""

import keras
import numpy as np
import pytest
from golden_files import DTYPES
from keras import ops
from similarity_layers import (
    FAMILY,
    FILTERS,
    SIMILARITIES,
    TOLERANCES,
    assert_close,
    assert_equal,
    identity_parameters,
    static_matrix,
    to_matrix,
    values,
)

from nsl_keras import similarities
from nsl_keras.layers import NeuralSimilarityConv2D

RNG = np.random.default_rng(6)
each_layer = pytest.mark.parametrize("name", FAMILY)
one_layer_of_a_kind = pytest.mark.parametrize("name", ["conv2d", "depthwise_conv2d"])


def fit(layer, inputs, epochs=1, **options):
    """Some steps towards random targets."""
    model = keras.Sequential([layer])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", **options)
    inputs = ops.convert_to_numpy(inputs)
    targets = RNG.normal(size=layer.compute_output_shape(inputs.shape))
    model.fit(inputs, targets.astype("float32"), epochs=epochs, verbose=0)
    return model


# M, and what is computed from it.


@each_layer
def test_similarity_matrix_and_equivalent_kernel(name):
    member = FAMILY[name]
    for similarity in ("diagonal", "symmetric", "positive_semidefinite", "sparse_of_3"):
        layer = member.make_built(similarity=SIMILARITIES[similarity])
        assert_close(layer.similarity_matrix, static_matrix(layer), 1e-5)
        kernel = ops.convert_to_numpy(layer.kernel).astype("float64")
        flat = kernel.reshape(layer.taps, *kernel.shape[-2:])
        expected = np.einsum("tco,tu->uco", flat, static_matrix(layer))
        assert_close(layer.equivalent_kernel, expected.reshape(kernel.shape), 1e-5)


@pytest.mark.parametrize("what", ["fold", "equivalent_kernel", "similarity_matrix"])
@each_layer
def test_errors_of_what_needs_a_static_built_layer(name, what):
    def use(layer):
        attribute = getattr(layer, what)
        return attribute() if callable(attribute) else attribute

    member = FAMILY[name]
    with pytest.raises(ValueError, match=rf"`{what}` needs a built layer.*'early'"):
        use(member.make(kernel_size=3, name="early"))
    dynamic = member.make(kernel_size=2, predictor="sphere", name="moving")
    message = rf"`{what}` needs a static similarity.*'moving'.*predictor='predictor'"
    with pytest.raises(ValueError, match=message):
        use(dynamic)


@pytest.mark.parametrize(
    ("similarity", "jit_compile"),
    [
        *((similarity, False) for similarity in SIMILARITIES),
        ("sparse_of_3", True),
        ("positive_semidefinite", True),
    ],
)
def test_every_similarity_is_built_and_trained_by_fit(similarity, jit_compile):
    """`fit` builds what is not built while it traces its step."""
    layer = NeuralSimilarityConv2D(3, 3, similarity=SIMILARITIES[similarity])
    inputs = RNG.normal(size=(4, 6, 5, 2)).astype("float32")
    model = keras.Sequential([layer])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", jit_compile=jit_compile)
    history = model.fit(inputs, np.ones((4, 4, 3, 3)), epochs=3, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    identity = identity_parameters(layer.similarity, layer.similarity_matrix.shape[0])
    parameters = ops.convert_to_numpy(layer.similarity_parameters)
    moved = parameters != identity
    # Symmetric matrices and kernels of zeros aside, all of them.
    assert moved.mean() > 0.9
    assert_close(layer.fold()(inputs), layer(inputs), 1e-5)


# What the similarity starts from, and what holds it.


@pytest.mark.parametrize("dtype", DTYPES)
@each_layer
def test_similarity_initializer_is_the_matrix(name, dtype):
    member = FAMILY[name]
    taps = 2**member.rank
    matrix = RNG.normal(size=(taps, taps))
    matrix = matrix @ matrix.T
    for similarity in ("unconstrained", "symmetric", "positive_semidefinite"):
        layer = member.make(
            kernel_size=2,
            similarity=similarity,
            similarity_initializer=keras.initializers.Constant(matrix),
            dtype=dtype,
        )
        layer.build(member.inputs.shape)
        assert_close(layer.similarity_matrix, matrix, TOLERANCES[dtype])
    layer = member.make(
        kernel_size=2, similarity_initializer=keras.initializers.Constant(matrix)
    )
    layer.build(member.inputs.shape)
    assert_close(layer.similarity_matrix, np.diag(np.diag(matrix)), 1e-6)


def test_similarity_initializer_by_name_and_as_a_function():
    layer = NeuralSimilarityConv2D(
        6, 3, similarity="unconstrained", similarity_initializer="orthogonal"
    )
    layer.build((None, 9, 8, 4))
    matrix = ops.convert_to_numpy(layer.similarity_parameters)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(9), atol=1e-5)
    # The authors' start: only the taps on the kernel's own diagonal are live.
    layer = NeuralSimilarityConv2D(
        6,
        3,
        similarity_initializer=lambda shape, dtype: ops.diag(
            ops.reshape(ops.eye(3, dtype=dtype), (-1,))
        ),
    )
    layer.build((None, 9, 8, 4))
    assert_equal(layer.similarity_parameters, np.eye(3).reshape(-1))


def test_similarity_initializer_of_a_full_matrix_has_its_shape():
    shapes = []

    def initializer(shape, dtype):
        shapes.append(tuple(shape))
        return ops.zeros(shape, dtype=dtype)

    layer = NeuralSimilarityConv2D(
        6, 2, groups=2, similarity="full", similarity_initializer=initializer
    )
    layer.build((None, 9, 8, 6))
    assert set(shapes) == {(12, 12)}


@pytest.mark.parametrize("similarity", ["diagonal", "positive_semidefinite", "sparse"])
@each_layer
def test_similarity_regularizer_adds_a_loss(name, similarity):
    layer = FAMILY[name].make_built(
        similarity=similarity, similarity_regularizer=keras.regularizers.L1(0.3)
    )
    parameters = ops.convert_to_numpy(layer.similarity_parameters)
    (loss,) = layer.losses
    assert_close(loss, 0.3 * np.abs(parameters).sum(), 1e-5)


@each_layer
def test_kernel_regularizer_of_a_dynamic_layer_counts_the_predictor(name):
    argument = "depthwise" if FAMILY[name].depthwise else "kernel"
    layer = FAMILY[name].make_built(
        kernel_size=2, predictor="sphere", **{f"{argument}_regularizer": "l2"}
    )
    kernels = [v for v in layer.trainable_variables if v.name == "kernel"]
    assert len(kernels) == 3
    expected = sum(0.01 * np.sum(kernel**2) for kernel in values(kernels))
    assert_close(sum(layer.losses), expected, 1e-5)


def test_similarity_constraint_holds_in_fit():
    layer = NeuralSimilarityConv2D(
        FILTERS,
        3,
        similarity="unconstrained",
        similarity_initializer="random_normal",
        similarity_constraint="non_neg",
    )
    layer.build((None, 9, 8, 4))
    assert np.min(ops.convert_to_numpy(layer.similarity_parameters)) < 0
    fit(layer, RNG.normal(size=(2, 9, 8, 4)).astype("float32"))
    parameters = ops.convert_to_numpy(layer.similarity_parameters)
    assert np.min(parameters) == 0
    assert np.max(parameters) > 0


# A frozen kernel.


def trained_names(layer):
    return [variable.name for variable in layer.trainable_variables]


@one_layer_of_a_kind
def test_frozen_kernel_leaves_the_similarity_to_train(name):
    member = FAMILY[name]
    layer = member.make_built(kernel_size=2, kernel_trainable=False, learn_shape=True)
    assert trained_names(layer) == ["similarity", "shape"]
    assert layer.kernel_trainable is False
    frozen, free = [layer.kernel, layer.bias], [layer.similarity_parameters]
    layer.shape_parameters.assign(np.ones(layer.taps))
    before = values(frozen), values(free)
    fit(layer, member.tensor())
    for old, new in zip(before[0], values(frozen), strict=True):
        np.testing.assert_array_equal(new, old)
    for old, new in zip(before[1], values(free), strict=True):
        assert np.all(new != old)


@each_layer
def test_frozen_kernel_of_a_dynamic_layer_leaves_the_predictor_to_train(name):
    layer = FAMILY[name].make_built(
        kernel_size=2, predictor="sphere", kernel_trainable=False
    )
    names = [variable.path.split("/", 1)[1] for variable in layer.trainable_variables]
    assert names and all(path.startswith("predictor/") for path in names)


@pytest.mark.parametrize("when", ["construction", "before_build", "after_build"])
def test_kernel_trainable_can_be_set_at_any_time(when):
    member = FAMILY["conv2d"]
    layer = member.make(kernel_size=2, kernel_trainable=when != "construction")
    if when == "before_build":
        layer.kernel_trainable = False
    layer.build(member.inputs.shape)
    if when == "after_build":
        assert trained_names(layer) == ["kernel", "bias", "similarity"]
        layer.kernel_trainable = False
    assert trained_names(layer) == ["similarity"]
    assert layer.kernel_trainable is False
    layer.kernel_trainable = True
    assert trained_names(layer) == ["kernel", "bias", "similarity"]


def test_model_trainable_thaws_the_kernel():
    member = FAMILY["conv2d"]
    layer = member.make(kernel_size=2, kernel_trainable=False)
    model = keras.Sequential([keras.Input(member.inputs.shape[1:]), layer])
    assert len(model.trainable_variables) == 1
    model.trainable = False
    assert model.trainable_variables == []
    # Frozen as a whole: what was asked for stays asked for.
    assert layer.kernel_trainable is False
    assert layer.get_config()["kernel_trainable"] is False
    model.trainable = True
    assert len(model.trainable_variables) == 3
    assert layer.kernel_trainable is True
    assert layer.get_config()["kernel_trainable"] is True


@pytest.mark.parametrize("predictor", [None, "sphere"])
@one_layer_of_a_kind
def test_frozen_kernel_goes_through_a_file(name, predictor, tmp_path):
    member = FAMILY[name]
    layer = member.make(kernel_size=2, predictor=predictor)
    model = keras.Sequential([keras.Input(member.inputs.shape[1:]), layer])
    layer.kernel_trainable = False
    model.save(tmp_path / "frozen.keras")
    loaded = keras.saving.load_model(tmp_path / "frozen.keras")
    again = loaded.layers[0]
    assert again.kernel_trainable is False
    assert trained_names(again) == trained_names(layer)
    assert len(loaded.non_trainable_variables) == len(model.non_trainable_variables)
    for old, new in zip(values(layer.weights), values(again.weights), strict=True):
        np.testing.assert_array_equal(new, old)
    assert_equal(loaded(member.tensor()), model(member.tensor()))
    # The plain layer that it folds to is an ordinary one.
    if predictor is None:
        assert len(layer.fold().trainable_variables) == 2


# Similarities of the user's own.


@keras.saving.register_keras_serializable("tests")
class Blend(similarities.Similarity):
    """`M = a I + b J / T`, `J` all ones: a mean filter mixed in, by two parameters."""

    def __init__(self, taps):
        self.taps = taps

    def parameter_shape(self, taps):
        return (2,)

    def parameters_from(self, matrix):
        mean = matrix[0, 1] * self.taps
        return ops.stack([matrix[0, 0] - matrix[0, 1], mean])

    def matrix(self, parameters):
        own, mean = parameters[..., :1, None], parameters[..., 1:, None]
        return own * ops.eye(self.taps, dtype=parameters.dtype) + mean / self.taps

    def get_config(self):
        return {"taps": self.taps}


def blend(parameters):
    parameters = np.asarray(ops.convert_to_numpy(parameters), "float64")
    taps = 6
    return parameters[..., :1, None] * np.eye(taps) + parameters[..., 1:, None] / taps


@pytest.mark.parametrize("predictor", [None, "cnn"])
@one_layer_of_a_kind
def test_own_similarity(name, predictor):
    member, dtype = FAMILY[name], DTYPES[0]
    layer = member.make(
        kernel_size=(2, 3),
        padding="same",
        similarity=Blend(6),
        predictor=predictor,
        dtype=dtype,
    )
    layer.build(member.inputs.shape)
    if predictor is None:
        assert_equal(layer.similarity_parameters, [1.0, 0.0])
    config = keras.saving.serialize_keras_object(layer)
    assert keras.saving.deserialize_keras_object(config).similarity.taps == 6
    layer = member.make_built(
        kernel_size=(2, 3),
        padding="same",
        similarity=Blend(6),
        predictor=predictor,
        dtype=dtype,
    )
    inputs = member.tensor(dtype)
    if predictor is None:
        matrix = blend(layer.similarity_parameters)
        assert_close(layer.fold()(inputs), layer(inputs), TOLERANCES[dtype])
    else:
        matrix = np.eye(6) + blend(layer.predictor(inputs))
    assert_close(layer(inputs), member.expected(layer, matrix), TOLERANCES[dtype])


class TransposedParameters(similarities.Diagonal):
    """Breaks its own promise: a column of parameters instead of a row."""

    def parameters_from(self, matrix):
        return super().parameters_from(matrix)[:, None]

    def matrix(self, parameters):
        return super().matrix(parameters[..., 0])


class TooManyParameters(similarities.Diagonal):
    """Breaks its own promise: the whole matrix."""

    def parameters_from(self, matrix):
        return matrix


@pytest.mark.parametrize("predictor", [None, "cnn"], ids=["static", "dynamic"])
@pytest.mark.parametrize("similarity", [TransposedParameters, TooManyParameters])
def test_error_of_parameters_of_another_shape(similarity, predictor):
    layer = NeuralSimilarityConv2D(6, 3, similarity=similarity(), predictor=predictor)
    with pytest.raises(ValueError, match=r"parameters_from` must return .*\(9,\)"):
        layer(FAMILY["conv2d"].tensor())


def test_reference_matrices_of_the_tests():
    """What the tests compare with, on entries that one can read off."""
    cholesky = to_matrix(SIMILARITIES["positive_semidefinite"], np.array([2.0, 3, 4]))
    np.testing.assert_array_equal(cholesky, [[4, 6], [6, 25]])
    matrix = np.array([[1.0, -5], [2, 3]])
    sparse = to_matrix(similarities.Sparse(2), matrix)
    np.testing.assert_array_equal(sparse, [[0, -5], [0, 3]])
    symmetric = to_matrix(SIMILARITIES["symmetric"], matrix)
    np.testing.assert_array_equal(symmetric, [[1, -1.5], [-1.5, 3]])
