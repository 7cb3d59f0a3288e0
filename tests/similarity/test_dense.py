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
    values,
)

from nsl_keras.layers import NeuralSimilarityDense
from nsl_keras.predictors import DenseSimilarityPredictor

FEATURES, UNITS = 12, 5
INPUTS = np.random.default_rng(5).normal(size=(2, 3, FEATURES))
STATIC_SIMILARITIES = [name for name in SIMILARITIES if name != "full"]
BLOCK_SIZES = (None, 4)
KINDS = ("sphere", "full_sphere", "mlp")

each_static = pytest.mark.parametrize("similarity", STATIC_SIMILARITIES)
each_dynamic = pytest.mark.parametrize("similarity", DYNAMIC_SIMILARITIES)
each_block_size = pytest.mark.parametrize("block_size", BLOCK_SIZES)


def inputs(dtype="float32"):
    return ops.convert_to_tensor(INPUTS, dtype=dtype)


def made(similarity, **options):
    """A built layer with random weights."""
    layer = NeuralSimilarityDense(UNITS, similarity=SIMILARITIES[similarity], **options)
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


# Static.


@pytest.mark.parametrize(
    ("shape", "similarity", "block_size"),
    [
        *(((2, 3, FEATURES), s, None) for s in STATIC_SIMILARITIES if "_of_" not in s),
        *(((2, 3, FEATURES), s, 4) for s in ("diagonal", "unconstrained")),
        ((6, FEATURES), "unconstrained", 4),
        ((2, 1, 3, 4, FEATURES), "unconstrained", 4),
    ],
)
def test_starts_as_dense(shape, similarity, block_size):
    layer = NeuralSimilarityDense(
        UNITS,
        "tanh",
        similarity=SIMILARITIES[similarity],
        block_size=block_size,
        bias_initializer="random_normal",
    )
    plain = keras.layers.Dense(UNITS, "tanh")
    vectors = ops.convert_to_tensor(np.random.default_rng(1).normal(size=shape), "float32")
    outputs = layer(vectors)
    plain.build(shape)
    plain.kernel.assign(layer.kernel)
    plain.bias.assign(layer.bias)
    assert_close(outputs, plain(vectors), 1e-6)
    assert layer.compute_output_shape(shape) == tuple(outputs.shape)


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
    kernel = np.asarray(ops.convert_to_numpy(layer.kernel), "float64")
    assert_close(layer.equivalent_kernel, in_blocks(matrix).T @ kernel, TOLERANCES[dtype])


def test_a_permutation_reads_the_features_of_each_block_in_its_order():
    layer = NeuralSimilarityDense(
        FEATURES, similarity="unconstrained", block_size=3, kernel_initializer="identity"
    )
    layer.build((None, FEATURES))
    layer.similarity_parameters.assign(np.eye(3)[[2, 0, 1]])
    received = ops.convert_to_numpy(layer(ops.reshape(ops.arange(12.0), (1, 12))))
    np.testing.assert_array_equal(received[0], [2, 0, 1, 5, 3, 4, 8, 6, 7, 11, 9, 10])


@pytest.mark.parametrize("predictor", [None, "mlp"])
def test_learned_shape_masks_features_of_every_block(predictor):
    layer = made("unconstrained", block_size=4, learn_shape=True, predictor=predictor)
    layer.shape_parameters.assign([1.0, 0.4, 0.6, 0.0])
    masked = made("unconstrained", block_size=4, predictor=predictor)
    for variable in masked.weights:
        same = next(v for v in layer.weights if v.path.split("/")[1:] == _tail(variable))
        variable.assign(same)
    rows = np.tile([1.0, 0.0, 1.0, 0.0], 3)[:, None]
    masked.kernel.assign(rows * ops.convert_to_numpy(layer.kernel))
    assert_close(layer(inputs()), masked(inputs()), 1e-6)
    assert_equal(layer.learned_shape, [1, 0, 1, 0])


def _tail(variable):
    return variable.path.split("/")[1:]


def test_integers_are_taken_as_numbers():
    layer = made("unconstrained")
    integers = np.arange(2 * FEATURES).reshape(2, FEATURES)
    assert_close(layer(integers), layer(integers.astype("float32")), 1e-6)


def test_masks_pass_through():
    model = keras.Sequential(
        [keras.layers.Masking(), NeuralSimilarityDense(UNITS), keras.layers.LSTM(2)]
    )
    padded = np.concatenate([INPUTS, np.zeros((2, 4, FEATURES))], axis=1)
    assert_close(model(padded), model(INPUTS), 1e-5)


def test_regularizers_and_constraints_reach_the_weights():
    layer = made(
        "unconstrained",
        similarity_regularizer=keras.regularizers.L1(0.5),
        kernel_regularizer=keras.regularizers.L2(0.1),
        similarity_constraint="non_neg",
    )
    expected = 0.5 * np.sum(np.abs(static_matrix(layer)))
    expected += 0.1 * np.sum(np.square(ops.convert_to_numpy(layer.kernel)))
    assert_close(sum(layer.losses), expected, 1e-5)
    assert isinstance(layer.similarity_parameters.constraint, keras.constraints.NonNeg)


# Dynamic.


@pytest.mark.parametrize(
    ("similarity", "dtype"),
    [
        *((each, DTYPES[0]) for each in DYNAMIC_SIMILARITIES),
        *(("unconstrained", dtype) for dtype in DTYPES[1:]),
    ],
)
@each_block_size
def test_dynamic_formula(similarity, block_size, dtype):
    layer = made(similarity, block_size=block_size, predictor="mlp", dtype=dtype)
    prediction = np.asarray(ops.convert_to_numpy(layer.predictor(inputs(dtype))), "float64")
    identity = identity_parameters(layer.similarity, block_size or FEATURES)
    parameters = prediction.reshape(2, 3, *identity.shape) + identity
    matrices = to_matrix(layer.similarity, parameters)
    assert np.ptp(matrices, axis=(0, 1)).max() > 0.1
    expected = by_formula(layer, in_blocks(matrices))
    assert_close(layer(inputs(dtype)), expected, 10 * TOLERANCES[dtype])


@each_dynamic
def test_a_predictor_of_zeros_is_dense(similarity):
    layer = made(similarity, block_size=3, predictor="mlp")
    for variable in layer.predictor.weights:
        variable.assign(0 * variable)
    assert_close(layer(inputs()), by_formula(layer, np.eye(FEATURES)), 1e-6)


@pytest.mark.parametrize("normalized", [None, True, False])
@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
@pytest.mark.parametrize("kind", KINDS)
def test_predictors_by_their_formulas(kind, similarity, normalized):
    predictor = DenseSimilarityPredictor(
        3, kind, similarity, batch_normalization=normalized
    )
    predictor.build((None, None, FEATURES))
    randomize(predictor)
    arrays = {v.path.split("/", 1)[1]: np.asarray(v, "float64") for v in predictor.weights}
    assert arrays["hidden_dense/kernel"].shape[1] == (
        64 if similarity == "diagonal" else 128
    )
    batch_norms = {
        (kind, similarity): (True, True)
        for kind, similarity in [
            ("sphere", "diagonal"),
            ("mlp", "diagonal"),
            ("full_sphere", "diagonal"),
            ("full_sphere", "unconstrained"),
        ]
    }
    batch_norms["mlp", "unconstrained"] = (False, True)
    batch_norms["sphere", "unconstrained"] = (False, False)
    hidden_normalized, output_normalized = (
        batch_norms[kind, similarity] if normalized is None else (normalized, normalized)
    )

    def dense(vectors, name, norms):
        kernel = arrays[f"{name}_dense/kernel"]
        outputs = vectors @ kernel
        if "input" in norms:
            outputs /= np.sqrt(np.sum(vectors**2, axis=-1, keepdims=True) + 1e-4)
        if "kernel" in norms:
            outputs /= np.sqrt(np.sum(kernel**2, axis=0) + 1e-4)
        return outputs

    def normalize(outputs, name):
        part = {k.rsplit("/")[-1]: v for k, v in arrays.items() if f"{name}_norm" in k}
        scaled = (outputs - part["moving_mean"]) / np.sqrt(part["moving_variance"] + 1e-3)
        return scaled * part["gamma"] + part["beta"]

    hidden, output = {
        "sphere": (("input",), ()),
        "full_sphere": (("input", "kernel"),) * 2,
        "mlp": ((), ()),
    }[kind]
    expected = dense(INPUTS, "hidden", hidden)
    if hidden_normalized:
        expected = normalize(expected, "hidden")
    expected = dense(np.maximum(expected, 0), "output", output)
    if output_normalized:
        expected = normalize(expected, "output")
    received = predictor(inputs())
    assert_close(received, expected, 1e-4)
    assert predictor.compute_output_shape((2, 3, FEATURES)) == tuple(received.shape)
    assert len(predictor.weights) == 2 + 4 * hidden_normalized + 4 * output_normalized


def test_the_predictor_starts_small():
    layer = NeuralSimilarityDense(UNITS, similarity="unconstrained", predictor="mlp")
    layer.build((None, 200))
    kernels = (layer.predictor.hidden_dense.kernel, layer.predictor.output_dense.kernel)
    for kernel, scale in zip(kernels, (0.1, 0.001), strict=True):
        expected = scale * np.sqrt(2 / kernel.shape[0])
        np.testing.assert_allclose(
            np.std(ops.convert_to_numpy(kernel)), expected, rtol=0.05
        )


def test_kernel_regularizer_reaches_the_predictor_made_by_name():
    layer = NeuralSimilarityDense(
        UNITS, predictor="sphere", kernel_regularizer=keras.regularizers.L2(0.1)
    )
    layer.build((None, FEATURES))
    assert len(layer.losses) == 3


def test_kernel_trainable():
    layer = made("diagonal", kernel_trainable=False)
    assert [v.name for v in layer.trainable_variables] == ["similarity"]
    layer.kernel_trainable = True
    assert len(layer.trainable_variables) == 3


# Gradients.


@each_block_size
@each_static
def test_gradients_of_the_static_layer(similarity, block_size):
    dtype = DTYPES[0]
    layer = made(similarity, block_size=block_size, dtype=dtype)
    # The sparse gradient goes past the mask on purpose; a Cholesky factor is squared.
    skip = ("similarity",) if similarity.startswith("sparse") else ()
    check_gradients(
        *(layer, inputs(dtype), dtype, 1e-2),
        {"float64": 1e-8, "float32": 1e-3}[dtype],
        skip=skip,
    )


@pytest.mark.skipif("float64" not in DTYPES, reason="needs float64")
@pytest.mark.parametrize(
    ("similarity", "kind", "training"),
    [
        ("diagonal", "sphere", True),
        ("diagonal", "full_sphere", False),
        ("unconstrained", "mlp", False),
        ("unconstrained", "full_sphere", True),
        ("symmetric", "mlp", True),
        ("positive_semidefinite", "sphere", False),
    ],
)
def test_gradients_of_the_dynamic_layer(similarity, kind, training):
    layer = made(similarity, block_size=3, predictor=kind, dtype="float64")
    check_gradients(layer, inputs("float64"), "float64", 1e-6, 1e-5, training)


# Folding.


@each_block_size
@pytest.mark.parametrize(
    ("similarity", "dtype"),
    [
        *((similarity, DTYPES[0]) for similarity in STATIC_SIMILARITIES),
        *(("symmetric", dtype) for dtype in (*DTYPES[1:], "mixed_bfloat16")),
        ("positive_semidefinite", "mixed_float16"),
    ],
)
def test_fold(similarity, dtype, block_size):
    layer = made(similarity, block_size=block_size, activation="tanh", dtype=dtype)
    before = values(layer.variables)
    plain = layer.fold()
    assert type(plain) is keras.layers.Dense
    # Bit for bit, in half precision too: the kernel is rounded once, as Dense does.
    assert_equal(plain(inputs()), layer(inputs()))
    for old, variable in zip(before, layer.variables, strict=True):
        assert_equal(variable.value, old)
    layer.similarity_parameters.assign(1.1 * layer.similarity_parameters)
    with pytest.raises(AssertionError):
        assert_equal(plain(inputs()), layer(inputs()))


def test_the_folded_layer_trains_by_itself():
    layer = made("symmetric")
    plain = layer.fold()
    model = keras.Sequential([plain])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    before, folded = values(layer.variables), values(plain.variables)
    model.fit(INPUTS[0], np.zeros((3, UNITS)), verbose=0)
    for old, variable in zip(before, layer.variables, strict=True):
        assert_equal(variable.value, old)
    for old, variable in zip(folded, plain.variables, strict=True):
        assert np.any(ops.convert_to_numpy(variable) != old)


def test_fold_keeps_what_the_layer_is():
    layer = made(
        "diagonal",
        activation="relu",
        use_bias=False,
        kernel_regularizer=keras.regularizers.L2(0.1),
        kernel_constraint="non_neg",
        activity_regularizer=keras.regularizers.L1(0.1),
        name="named",
        dtype="mixed_bfloat16",
    )
    config, plain = layer.get_config(), layer.fold().get_config()
    kept = {*keras.layers.Dense(UNITS).get_config(), "activity_regularizer"} & {*config}
    assert len(kept) == 13
    assert {k: plain[k] for k in kept} == {k: config[k] for k in kept}


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"units": 0}, "`units`"),
        ({"block_size": 0}, "`block_size`"),
        ({"similarity": "full"}, "`similarity` must be shared .* similarity='Full'"),
        ({"similarity": "cosine"}, "`similarity` must be one of"),
        ({"similarity": "sparse", "predictor": "mlp"}, "static and takes no predictor"),
        ({"predictor": "cnn"}, "`predictor` must be None, one of 'sphere'.*'mlp'"),
        (
            {"predictor": "mlp", "similarity_regularizer": "l1"},
            "`similarity_regularizer` and",
        ),
        ({"shape_threshold": 1.0}, "`shape_threshold`"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        NeuralSimilarityDense(**{"units": UNITS, **options})


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({}, (None, None), "last axis of the input must be known"),
        ({"block_size": 5}, (None, 12), "`block_size` must divide .*5, 12 features"),
        (
            {"predictor": keras.layers.Dense(7)},
            (None, 12),
            r"`predictor` must map .* \(None, 12\) .*shape \(None, 7\)",
        ),
        (
            {"predictor": DenseSimilarityPredictor(4), "block_size": 3},
            (None, 12),
            r"`predictor` must map",
        ),
    ],
)
def test_bad_inputs(options, shape, message):
    layer = NeuralSimilarityDense(UNITS, **options)
    with pytest.raises(ValueError, match=message):
        layer.build(shape)


@pytest.mark.parametrize("what", ["similarity_matrix", "equivalent_kernel", "fold"])
def test_dynamic_layers_have_no_static_matrix(what):
    def read(layer):
        value = getattr(layer, what)
        return value() if what == "fold" else value

    with pytest.raises(ValueError, match=f"`{what}` needs a static similarity"):
        read(made("diagonal", predictor="mlp"))
    with pytest.raises(ValueError, match=f"`{what}` needs a built layer"):
        read(NeuralSimilarityDense(UNITS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1.5}, "`block_size`"),
        ({"kind": "cnn"}, "`kind` must be one of 'sphere', 'full_sphere', 'mlp'"),
        ({"similarity": "sparse"}, "`similarity` must be one that can be predicted"),
        ({"hidden_units": 0}, "`hidden_units`"),
        ({"batch_normalization": "no"}, "`batch_normalization` must be one of None"),
        ({"momentum": 1.0}, "`momentum`"),
        ({"epsilon": 0.0}, "`epsilon`"),
    ],
)
def test_bad_arguments_of_the_predictor(options, message):
    with pytest.raises(ValueError, match=message):
        DenseSimilarityPredictor(**options)


def test_the_predictor_needs_to_know_the_features():
    with pytest.raises(ValueError, match="last axis of the input must be known"):
        DenseSimilarityPredictor().build((None, None))
