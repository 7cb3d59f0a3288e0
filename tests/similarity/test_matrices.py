"""Similarities by name and by file, their structure, and their shortcuts."""

import keras
import numpy as np
import pytest
from golden_files import DTYPES, gradients
from keras import ops
from similarity_layers import (
    DYNAMIC_SIMILARITIES,
    FAMILY,
    SIMILARITIES,
    assert_close,
    assert_equal,
    identity_parameters,
    to_matrix,
)

from nsl_keras import predictors, similarities
from nsl_keras.layers import NeuralSimilarityConv2D
from nsl_keras.similarity import matrices

RNG = np.random.default_rng(8)
KINDS = {
    "diagonal": similarities.Diagonal,
    "unconstrained": similarities.Unconstrained,
    "symmetric": similarities.Symmetric,
    "positive_semidefinite": similarities.PositiveSemidefinite,
    "sparse": similarities.Sparse,
    "full": similarities.Full,
}
each_kind = pytest.mark.parametrize("name", KINDS)


def random(*shape, dtype="float32"):
    return ops.convert_to_tensor(RNG.normal(size=shape).astype(dtype))


# By name and by file.


@keras.saving.register_keras_serializable("tests")
class Shifted(similarities.Unconstrained):
    """A similarity with an argument, to go through a file."""

    def __init__(self, shift):
        self.shift = shift

    def matrix(self, parameters):
        return parameters + self.shift

    def get_config(self):
        return {"shift": self.shift}


@each_kind
def test_get_and_serialize_by_name(name):
    similarity = similarities.get(name)
    assert type(similarity) is KINDS[name]
    assert similarities.serialize(similarity) == name
    assert similarities.get(similarity) is similarity
    config = keras.saving.serialize_keras_object(similarity)
    assert config["registered_name"] == f"nsl_keras>{KINDS[name].__name__}"
    assert type(similarities.get(config)) is KINDS[name]


@pytest.mark.parametrize(
    "similarity", [Shifted(0.25), similarities.Sparse(7)], ids=["own", "sparse"]
)
def test_similarity_with_an_argument_goes_through_its_config(similarity):
    serialized = similarities.serialize(similarity)
    assert isinstance(serialized, dict)
    again = similarities.get(serialized)
    assert type(again) is type(similarity)
    assert again.get_config() == similarity.get_config()


@pytest.mark.parametrize(
    "identifier",
    [
        "diag",
        None,
        3,
        similarities.Diagonal,
        {"class_name": "Unknown"},
        keras.saving.serialize_keras_object(keras.initializers.Zeros()),
    ],
    ids=["name", "none", "number", "class", "broken_config", "config_of_another"],
)
def test_unknown_identifiers_name_the_known_ones(identifier):
    known = ", ".join(repr(name) for name in KINDS)
    message = rf"`similarity` must be one of {known}.*, or a `.*Received: similarity="
    with pytest.raises(ValueError, match=message):
        similarities.get(identifier)


# Parameters and matrices.


@pytest.mark.parametrize(
    ("name", "taps", "shape", "filters", "normalized", "static_only"),
    [
        ("diagonal", 9, (9,), 64, True, False),
        ("unconstrained", 1, (1, 1), 128, False, False),
        ("symmetric", 9, (9, 9), 128, False, False),
        ("positive_semidefinite", 27, (378,), 128, False, False),
        ("sparse", 9, (9, 9), 128, False, True),
        ("full", 18, (18, 18), 128, False, True),
    ],
)
def test_parameters(name, taps, shape, filters, normalized, static_only):
    similarity = similarities.get(name)
    assert similarity.parameter_shape(taps) == shape
    assert similarity.predictor_filters == filters
    assert similarity.predictor_batch_normalization is normalized
    assert similarity.static_only is static_only
    assert similarity.shared_by_channels is (name != "full")


@pytest.mark.parametrize("dtype", DTYPES)
@each_kind
def test_matrix_of_parameters_and_back(name, dtype):
    similarity = similarities.get(name)
    parameters = random(*similarity.parameter_shape(6), dtype=dtype)
    matrix = similarity.matrix(parameters)
    assert tuple(matrix.shape) == (6, 6)
    assert keras.backend.standardize_dtype(matrix.dtype) == dtype
    tolerance = {"float64": 1e-12, "float32": 1e-5}[dtype]
    assert_close(matrix, to_matrix(similarity, parameters), tolerance)
    # Not the same parameters everywhere, but the same matrix.
    again = ops.cast(similarity.parameters_from(matrix), dtype)
    assert tuple(again.shape) == similarity.parameter_shape(6)
    assert_close(similarity.matrix(again), matrix, tolerance)


@each_kind
def test_identity(name):
    similarity = similarities.get(name)
    parameters = similarity.parameters_from(np.eye(9, dtype="float32"))
    assert_equal(parameters, identity_parameters(similarity, 9))
    assert_equal(similarity.matrix(ops.cast(parameters, "float32")), np.eye(9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DYNAMIC_SIMILARITIES)
def test_shortcuts_agree_with_the_general_way(name, dtype):
    """What a kind overrides equals what the base class makes of its matrix."""
    similarity = similarities.get(name)
    tolerance = {"float64": 1e-13, "float32": 1e-5}[dtype]
    shape = similarity.parameter_shape(6)
    parameters, kernel = random(*shape, dtype=dtype), random(6, 3, 4, dtype=dtype)
    per_position = random(2, 5, 4, *shape, dtype=dtype)
    windows = [random(2, 5, 4, 3, dtype=dtype) for _ in range(6)]
    rows = random(2, 5, 4, 3, 6, dtype=dtype)
    for method, arguments in (
        ("equivalent_kernel", (parameters, kernel)),
        ("compare_windows", (per_position, windows)),
        ("compare_windows", (per_position[:, :1, :1], windows)),
        ("compare_rows", (per_position, rows)),
    ):
        special, general = (
            ops.concatenate(each, axis=-1) if isinstance(each, list) else each
            for each in (
                getattr(similarity, method)(*arguments),
                getattr(matrices.Similarity, method)(similarity, *arguments),
            )
        )
        assert_close(special, general, tolerance)


@pytest.mark.parametrize("name", DYNAMIC_SIMILARITIES)
def test_rows_of_the_matrix_are_the_taps_of_the_kernel(name):
    """`W^T M x` is the same whether `M` goes to the kernel or to the patches."""
    similarity = similarities.get(name)
    parameters = random(*similarity.parameter_shape(6))
    kernel, patches = random(6, 3, 4), random(2, 6, 3)
    matrix = to_matrix(similarity, parameters)
    expected = np.einsum("tco,tu,nuc->no", kernel, matrix, patches)
    equivalent = ops.convert_to_numpy(similarity.equivalent_kernel(parameters, kernel))
    assert_close(np.einsum("uco,nuc->no", equivalent, patches), expected, 1e-5)
    rows = ops.swapaxes(patches, 1, 2)
    compared = ops.convert_to_numpy(similarity.compare_rows(parameters, rows))
    assert_close(np.einsum("tco,nct->no", kernel, compared), expected, 1e-5)


# Names of one's own.


def test_a_name_of_ones_own(tmp_path):
    @similarities.register("test_lazy")
    class Lazy(similarities.Unconstrained):
        """`M = (I + A) / 2`: half of the identity stays, whatever is learned."""

        def parameters_from(self, matrix):
            return 2 * matrix - np.eye(len(matrix))

        def matrix(self, parameters):
            taps = parameters.shape[-1]
            return 0.5 * (parameters + ops.eye(taps, dtype=parameters.dtype))

    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            NeuralSimilarityConv2D(4, 3, similarity="test_lazy"),
            NeuralSimilarityConv2D(4, 3, similarity="test_lazy", predictor="cnn"),
        ]
    )
    model.save(tmp_path / "lazy.keras")
    loaded = keras.saving.load_model(tmp_path / "lazy.keras")
    images = random(2, 8, 8, 2)
    assert_equal(loaded(images), model(images))
    assert [type(layer.similarity) for layer in loaded.layers] == [Lazy, Lazy]
    assert similarities.serialize(Lazy()) == "test_lazy"
    with pytest.raises(ValueError, match=r"`name` must not be .*name='diagonal'"):
        similarities.register("diagonal")(Lazy)


def test_a_name_of_ones_own_with_arguments():
    @similarities.register("test_scaled")
    class Scaled(similarities.Unconstrained):
        def __init__(self, scale):
            self.scale = scale

        def matrix(self, parameters):
            return self.scale * parameters

        def get_config(self):
            return {"scale": self.scale}

    layer = NeuralSimilarityConv2D(4, 3, similarity=Scaled(2.0))
    again = NeuralSimilarityConv2D.from_config(layer.get_config())
    assert again.similarity.scale == 2.0


# Positive semidefinite.


def from_initial_matrix(matrix):
    layer = NeuralSimilarityConv2D(
        2,
        (2, 3),
        similarity="positive_semidefinite",
        similarity_initializer=keras.initializers.Constant(matrix),
    )
    layer.build((None, 5, 5, 2))
    return layer


def test_positive_semidefinite_has_no_negative_eigenvalue():
    similarity = similarities.PositiveSemidefinite()
    for _ in range(5):
        matrix = similarity.matrix(random(45))
        eigenvalues = np.linalg.eigvalsh(ops.convert_to_numpy(matrix).astype("float64"))
        assert eigenvalues.min() > -1e-5 * eigenvalues.max()
        assert_close(matrix, ops.transpose(matrix), 1e-6)


GRAM = RNG.normal(size=(6, 3))


@pytest.mark.parametrize(
    "matrix",
    [
        RNG.normal(size=(6, 8)),
        GRAM,
        RNG.normal(size=(6, 1)),
        np.ones((6, 1)),
        np.diag([2.0, 0, 1, 0, 0, 3]),
        1e-4 * RNG.normal(size=(6, 6)),
    ],
    ids=["regular", "rank_3", "rank_1", "mean", "diagonal_with_zeros", "small"],
)
def test_positive_semidefinite_starts_from_any_such_matrix(matrix):
    matrix = matrix @ matrix.T
    assert_close(from_initial_matrix(matrix).similarity_matrix, matrix, 1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_positive_semidefinite_starts_in_half_precision(dtype):
    """Rounded to it a matrix of rank 3 would have eigenvalues below zero."""
    matrix = GRAM @ GRAM.T
    layer = NeuralSimilarityConv2D(
        *(4, (2, 3)),
        similarity="positive_semidefinite",
        similarity_initializer=keras.initializers.Constant(matrix),
        dtype=dtype,
    )
    layer.build((None, 5, 5, 2))
    assert layer.similarity_parameters.dtype == dtype
    found = ops.convert_to_numpy(ops.cast(layer.similarity_matrix, "float32"))
    np.testing.assert_allclose(found, matrix, atol=0.05 * matrix.max())


@pytest.mark.parametrize(
    "matrix",
    [
        np.diag([1.0, 1, 1, 1, 1, -0.1]),
        -np.eye(6),
        np.eye(6) + np.eye(6, k=1),
        GRAM @ GRAM.T - 0.01 * np.eye(6),
    ],
    ids=["negative_entry", "negative", "not_symmetric", "slightly_negative"],
)
def test_errors_of_an_initial_matrix_that_is_not_positive_semidefinite(matrix):
    message = (
        r"`similarity_initializer` must give a symmetric, positive semidefinite matrix "
        r".*Received: a matrix with eigenvalues down to"
    )
    with pytest.raises(ValueError, match=message):
        from_initial_matrix(matrix)


# Sparse.


def sparse(nonzeros, kernel_size=(3, 3)):
    return similarities.Sparse(nonzeros).for_kernel_size(kernel_size)


@pytest.mark.parametrize("nonzeros", [1, 40, 81, None])
def test_sparse_keeps_the_largest_entries_and_zeros_the_others(nonzeros):
    parameters = ops.convert_to_numpy(random(9, 9))
    matrix = ops.convert_to_numpy(sparse(nonzeros).matrix(parameters))
    kept = 9 if nonzeros is None else nonzeros
    assert np.count_nonzero(matrix) == kept
    smallest = np.sort(np.abs(parameters), axis=None)[-kept]
    np.testing.assert_array_equal(
        matrix, np.where(np.abs(parameters) >= smallest, parameters, 0.0)
    )


@pytest.mark.parametrize(
    ("kernel_size", "centre"),
    [((3, 3), 4), ((5,), 2), ((3, 1, 3), 4), ((5, 3), 7)],
    ids=str,
)
def test_sparse_ties_go_to_the_entries_nearest_to_the_centre(kernel_size, centre):
    taps = int(np.prod(kernel_size))
    for parameters in (np.eye(taps), np.ones((taps, taps)), -np.ones((taps, taps))):
        matrix = ops.convert_to_numpy(
            sparse(1, kernel_size).matrix(parameters.astype("float32"))
        )
        assert np.argwhere(matrix).tolist() == [[centre, centre]]


def test_sparse_ties_by_their_distance():
    # A row of three taps: the centre with itself, then pairs of it with a neighbour.
    matrix = ops.convert_to_numpy(sparse(5, (3,)).matrix(np.ones((3, 3), "float32")))
    np.testing.assert_array_equal(matrix, [[0, 1, 0], [1, 1, 1], [0, 1, 0]])
    # A larger entry is kept, however far it is; the ties come after it.
    parameters = np.ones((3, 3), "float32")
    parameters[2, 0] = -1.5
    matrix = ops.convert_to_numpy(sparse(2, (3,)).matrix(parameters))
    np.testing.assert_array_equal(matrix, [[0, 0, 0], [0, 1, 0], [-1.5, 0, 0]])


def test_sparse_ties_in_a_compiled_layer():
    """From the identity, one entry of nine equal ones: the tap in the centre."""
    layer = NeuralSimilarityConv2D(
        4, 3, padding="same", similarity=similarities.Sparse(1), use_bias=False
    )
    model = keras.Sequential([keras.Input((6, 5, 3)), layer])
    inputs = RNG.normal(size=(2, 6, 5, 3)).astype("float32")
    centre = ops.convert_to_numpy(layer.kernel)[1, 1]
    for jit_compile in (False, True):
        model.compile(jit_compile=jit_compile)
        assert_close(model.predict(inputs, verbose=0), inputs @ centre, 1e-5)
    assert_equal(layer.similarity_matrix, np.diag(np.arange(9) == 4))


@pytest.mark.parametrize(
    ("name", "nonzeros"), [("conv1d", 3), ("conv2d", 1), ("depthwise_conv2d", None)]
)
def test_gradient_of_every_sparse_entry_is_that_of_the_matrix(name, nonzeros):
    """The straight-through gradient: dL/dM, also where an entry is masked."""
    member = FAMILY[name]
    layer = member.make_built(kernel_size=2, similarity=similarities.Sparse(nonzeros))
    unconstrained = member.make_built(kernel_size=2, similarity="unconstrained")
    unconstrained.similarity_parameters.assign(layer.similarity_matrix)
    inputs = member.tensor()
    cotangent = random(*layer.compute_output_shape(inputs.shape))
    received, expected = (
        gradients(
            lambda inputs: ops.sum(ops.square(each(inputs) - cotangent)),
            [inputs],
            [each.similarity_parameters],
        )
        for each in (layer, unconstrained)
    )
    for ours, theirs in zip(received, expected, strict=True):
        assert_close(ours, theirs, 1e-5)
    assert np.count_nonzero(ops.convert_to_numpy(received[1])) == layer.taps**2


def test_sparse_entries_come_back():
    """From the centre tap, training finds the shift that a teacher applies."""
    student = NeuralSimilarityConv2D(
        3,
        3,
        use_bias=False,
        similarity=similarities.Sparse(1),
        kernel_trainable=False,
    )
    teacher = NeuralSimilarityConv2D(3, 3, use_bias=False, similarity="unconstrained")
    rng = np.random.default_rng(8)
    inputs = rng.normal(size=(16, 8, 8, 2)).astype("float32")
    for layer in (student, teacher):
        layer.build(inputs.shape)
    teacher.kernel.assign(rng.normal(size=(3, 3, 2, 3)))
    student.kernel.assign(teacher.kernel)
    target = np.zeros((9, 9), "float32")
    target[2, 7] = 1.0
    teacher.similarity_parameters.assign(target)
    start = ops.convert_to_numpy(student.similarity_matrix)
    assert start[4, 4] == 1.0
    assert start[2, 7] == 0.0
    model = keras.Sequential([student])
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    outputs = ops.convert_to_numpy(teacher(inputs))
    # The same batch thirty times: one epoch is faster than thirty.
    batches = (np.tile(each, (30, 1, 1, 1)) for each in (inputs, outputs))
    model.fit(*batches, batch_size=16, shuffle=False, verbose=0)
    matrix = ops.convert_to_numpy(student.similarity_matrix)
    assert np.argwhere(matrix).tolist() == [[2, 7]]
    assert matrix[2, 7] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("nonzeros", [0, -1, 2.0, "3", True])
def test_errors_of_nonzeros(nonzeros):
    message = r"`nonzeros` must be a positive integer.*nonzeros="
    with pytest.raises(ValueError, match=message):
        similarities.Sparse(nonzeros)


@pytest.mark.parametrize("name", FAMILY)
def test_error_of_more_nonzeros_than_entries(name):
    member = FAMILY[name]
    entries = 2 ** (2 * member.rank)
    member.make_built(kernel_size=2, similarity=similarities.Sparse(entries))
    layer = member.make(kernel_size=2, similarity=similarities.Sparse(entries + 1))
    message = rf"`nonzeros` must be at most {entries}, .*kernel_size=\(2,.*={entries + 1}"
    with pytest.raises(ValueError, match=message):
        layer.build(member.inputs.shape)


def test_subclass_of_the_sparse_similarity_stays_itself():
    class Halved(similarities.Sparse):
        def matrix(self, parameters):
            return 0.5 * super().matrix(parameters)

    layer = NeuralSimilarityConv2D(2, 3, similarity=Halved(1))
    layer.build((None, 6, 6, 1))
    assert_equal(layer.similarity_matrix, 0.5 * np.diag(np.arange(9) == 4))


# Full.


@pytest.mark.parametrize("name", [name for name in FAMILY if not FAMILY[name].depthwise])
def test_full_matrix_is_ordered_channel_by_channel(name):
    """One entry of `M` couples one tap of one channel with one of another."""
    member = FAMILY[name]
    layer = member.make(kernel_size=2, similarity="full", use_bias=False)
    layer.build(member.inputs.shape)
    taps, channels = layer.taps, 4
    assert tuple(layer.similarity_matrix.shape) == (taps * channels, taps * channels)
    row, column = 3 * taps + 1, 1 * taps + taps - 1
    matrix = np.zeros((taps * channels, taps * channels))
    matrix[row, column] = 2.0
    layer.similarity_parameters.assign(matrix)
    kernel, equivalent = (
        ops.convert_to_numpy(each).reshape(taps, channels, -1)
        for each in (layer.kernel, layer.equivalent_kernel)
    )
    expected = np.zeros_like(kernel)
    # W[t, c] reads x[u, d] through M[(c, t), (d, u)].
    expected[taps - 1, 1] = 2 * kernel[1, 3]
    assert_close(equivalent, expected, 1e-6)


class PerChannel(similarities.Similarity):
    """A factor for each tap of each channel: by the three methods alone."""

    shared_by_channels = False

    def parameter_shape(self, taps):
        return (taps,)

    def parameters_from(self, matrix):
        return ops.diagonal(matrix)

    def matrix(self, parameters):
        return parameters[..., None] * ops.eye(parameters.shape[-1])


def test_a_matrix_over_channels_of_ones_own():
    layer = NeuralSimilarityConv2D(4, 3, similarity=PerChannel())
    images = random(2, 5, 5, 3)
    layer(images)
    factors = RNG.normal(size=27)
    layer.similarity_parameters.assign(factors)
    # M is diagonal, channel after channel: each weight has a factor of its own.
    expected = layer.kernel * factors.reshape(3, 3, 3).transpose(1, 2, 0)[..., None]
    assert_close(layer.equivalent_kernel, expected, 1e-6)
    assert_close(layer.fold()(images), layer(images), 1e-5)
    for make in (
        lambda: NeuralSimilarityConv2D(4, 3, similarity=PerChannel(), predictor="sphere"),
        lambda: predictors.SimilarityPredictor(similarity=PerChannel()),
    ):
        with pytest.raises(ValueError, match="`similarity`"):
            make()


def test_names_in_the_tests_are_those_of_the_package():
    assert set(KINDS) <= set(SIMILARITIES)
    assert set(KINDS) <= set(matrices._NAMES)
