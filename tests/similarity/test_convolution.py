"""Convolutions with a neural similarity, against Keras's own and against the formula."""

import sys

import keras
import numpy as np
import pytest
from finite_differences import check_gradients
from golden_files import DTYPES, gradients
from keras import ops
from similarity_layers import (
    DYNAMIC_SIMILARITIES,
    FAMILY,
    FILTERS,
    LAYERS_AND_SIMILARITIES,
    SIMILARITIES,
    TOLERANCES,
    assert_close,
    assert_equal,
    channels_last,
    identity_parameters,
    name_of,
    static_matrix,
    to_matrix,
    values,
)

from nsl_keras.layers import NeuralSimilarityConv1D, NeuralSimilarityConv2D
from nsl_keras.predictors import SharedSimilarityPredictor, SimilarityPredictor

RNG = np.random.default_rng(5)
DTYPES_AND_FORMATS = [
    *((dtype, "channels_last") for dtype in (*DTYPES, "mixed_bfloat16")),
    ("float32", "channels_first"),
]

each_predictor = pytest.mark.parametrize("predictor", [None, "sphere"])
each_layer = pytest.mark.parametrize("name", FAMILY)
one_layer_of_a_kind = pytest.mark.parametrize("name", ["conv2d", "depthwise_conv2d"])
each_layer_and_similarity = pytest.mark.parametrize(
    ("name", "similarity"), LAYERS_AND_SIMILARITIES
)
each_dtype_and_format = pytest.mark.parametrize(
    ("dtype", "data_format"), DTYPES_AND_FORMATS
)

# An odd padding, a stride, a dilation, and the axes not alike.
SOME_GEOMETRIES = [
    {"kernel_size": (2, 3, 2), "padding": "same", "strides": 2},
    {"kernel_size": (3, 2, 1), "dilation_rate": (1, 3, 2)},
]


# The static layer against the plain one of Keras.


@each_dtype_and_format
@each_layer
def test_static_layer_starts_as_the_plain_layer(name, dtype, data_format):
    member = FAMILY[name]
    inputs = member.tensor(data_format=data_format)
    for geometry in SOME_GEOMETRIES:
        options = {**geometry, "data_format": data_format, "dtype": dtype}
        layer = member.make(bias_initializer="random_normal", **options)
        outputs = layer(inputs)
        plain = member.plain(**member.options(**options))
        plain.build(inputs.shape)
        plain.kernel.assign(layer.kernel)
        plain.bias.assign(layer.bias)
        assert_equal(outputs, plain(inputs))
        assert layer.compute_output_shape(inputs.shape) == tuple(outputs.shape)
        assert outputs.dtype == plain(inputs).dtype


@each_layer
def test_bias_goes_along_the_channels_where_the_width_equals_the_filters(name):
    member = FAMILY[name]
    shape = (2, 4, *[FILTERS] * member.rank)
    layer = member.make(
        kernel_size=3,
        padding="same",
        data_format="channels_first",
        bias_initializer="normal",
    )
    inputs = ops.convert_to_tensor(RNG.normal(size=shape), dtype="float32")
    with_bias = ops.convert_to_numpy(layer(inputs))
    bias = np.array(ops.convert_to_numpy(layer.bias))
    layer.bias.assign(np.zeros(FILTERS))
    without = ops.convert_to_numpy(layer(inputs))
    expected = bias.reshape(-1, *[1] * member.rank)
    assert_close(with_bias - without, np.broadcast_to(expected, with_bias.shape), 1e-5)


# The formula of the docstrings, in float64 loops.


@each_layer_and_similarity
def test_static_layer_follows_the_formula(name, similarity):
    member, dtype = FAMILY[name], DTYPES[0]
    inputs = member.tensor(dtype)
    groups = (name, similarity) in (("conv2d", "unconstrained"), ("conv2d", "full"))
    # Every geometry with two kinds, some with the others.
    every = similarity in ("diagonal", "unconstrained")
    for geometry in member.geometries(groups=groups) if every else SOME_GEOMETRIES:
        layer = member.make_built(
            similarity=SIMILARITIES[similarity], dtype=dtype, **geometry
        )
        outputs = layer(inputs)
        assert keras.backend.standardize_dtype(outputs.dtype) == dtype
        assert tuple(outputs.shape) == layer.compute_output_shape(inputs.shape)
        expected = member.expected(layer, static_matrix(layer))
        assert_close(outputs, expected, TOLERANCES[dtype], geometry)


@pytest.mark.parametrize(
    ("name", "similarity"),
    [
        ("conv1d", "unconstrained"),
        ("conv2d", "unconstrained"),
        ("conv2d", "full"),
        ("conv3d", "sparse_of_3"),
        ("depthwise_conv2d", "unconstrained"),
    ],
)
def test_static_layer_with_channels_first_follows_the_formula(name, similarity):
    member = FAMILY[name]
    inputs = member.tensor(data_format="channels_first")
    for geometry in [
        *SOME_GEOMETRIES,
        *([{"kernel_size": 2, "groups": 2}] if name == "conv2d" else []),
    ]:
        layer = member.make_built(
            similarity=SIMILARITIES[similarity], data_format="channels_first", **geometry
        )
        outputs = channels_last(layer(inputs), "channels_first")
        expected = member.expected(layer, static_matrix(layer))
        assert_close(outputs, expected, TOLERANCES["float32"], geometry)


def make_predictor(kind, member, similarity, dtype, geometry):
    """A predictor of a kind, with the layer's geometry and few hidden filters."""
    geometry = {
        key: value[: member.rank] if isinstance(value, tuple) else value
        for key, value in geometry.items()
    }
    kernel_size = geometry["kernel_size"]
    if isinstance(kernel_size, int):
        geometry["kernel_size"] = kernel_size = (kernel_size,) * member.rank
    options = {"similarity": similarity, "hidden_filters": 5, "dtype": dtype}
    if kind in ("sphere", "full_sphere", "cnn"):
        return SimilarityPredictor(kind=kind, **geometry, **options)
    if kind == "pooled":
        return SimilarityPredictor(pooled=True, **geometry, **options)
    if kind == "in_blocks":
        return SimilarityPredictor(downsampling=2, **geometry, **options)
    if kind.startswith("shared"):
        causal = geometry.get("padding") == "causal"
        return SharedSimilarityPredictor(
            kernel_size,
            adapted_filters=3,
            pooled=kind == "shared_pooled",
            padding="causal" if causal else "same",
            data_format=geometry.get("data_format"),
            **options,
        )
    outputs = identity_parameters(similarity, int(np.prod(kernel_size))).size
    if kind == "own":
        convolution = (
            keras.layers.Conv1D,
            keras.layers.Conv2D,
            keras.layers.Conv3D,
        )[member.rank - 1]
        return convolution(outputs, activation="tanh", dtype=dtype, **geometry)
    assert kind == "own_per_example"
    return keras.Sequential(
        [
            keras.layers.Flatten(dtype=dtype),
            keras.layers.Dense(outputs, "tanh", dtype=dtype),
        ]
    )


KINDS = (
    "sphere",
    "full_sphere",
    "cnn",
    "pooled",
    "shared",
    "shared_pooled",
    "own",
    "own_per_example",
)


def predicted_matrix(layer, inputs):
    """`M`, channels last, from what the predictor itself returns."""
    if layer.adaptation is not None:
        inputs = layer.adaptation(inputs)
    prediction = ops.convert_to_numpy(layer.predictor(inputs)).astype("float64")
    if prediction.ndim == 2:
        prediction = prediction.reshape(len(prediction), *[1] * layer.rank, -1)
    else:
        prediction = channels_last(prediction, layer.data_format)
    identity = identity_parameters(layer.similarity, layer.taps)
    prediction = prediction.reshape(*prediction.shape[:-1], *identity.shape)
    matrix = to_matrix(layer.similarity, identity + prediction)
    # A prediction that hardly varies would not show where it belongs.
    assert np.std(matrix, axis=tuple(range(layer.rank + 1))).max() > 0.01
    return matrix


def check_dynamic(name, similarity, kind, geometries, data_format="channels_last"):
    member = FAMILY[name]
    dtype = DTYPES[0] if data_format == "channels_last" else "float32"
    inputs = member.tensor(dtype, data_format)
    for geometry in geometries:
        options = {**geometry, "data_format": data_format}
        predictor = make_predictor(kind, member, similarity, dtype, options)
        layer = member.make_built(
            similarity=similarity, predictor=predictor, dtype=dtype, **options
        )
        outputs = layer(inputs)
        assert keras.backend.standardize_dtype(outputs.dtype) == dtype
        assert tuple(outputs.shape) == layer.compute_output_shape(inputs.shape)
        expected = member.expected(layer, predicted_matrix(layer, inputs))
        outputs = channels_last(outputs, data_format)
        assert_close(outputs, expected, TOLERANCES[dtype], options)


@pytest.mark.parametrize(
    ("name", "similarity"),
    [
        *(("conv2d", similarity) for similarity in DYNAMIC_SIMILARITIES),
        ("conv1d", "positive_semidefinite"),
        ("conv3d", "symmetric"),
        ("depthwise_conv2d", "unconstrained"),
    ],
)
def test_dynamic_layer_follows_the_formula(name, similarity):
    every = similarity in ("diagonal", "unconstrained")
    geometries = FAMILY[name].geometries(dynamic=True) if every else SOME_GEOMETRIES
    check_dynamic(name, SIMILARITIES[similarity], "sphere", geometries)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("conv2d", kind) for kind in KINDS[1:]),
        ("conv1d", "cnn"),
        ("conv1d", "shared_pooled"),
        ("conv3d", "pooled"),
        ("conv3d", "own"),
        ("depthwise_conv2d", "shared"),
        ("depthwise_conv2d", "own_per_example"),
    ],
)
def test_dynamic_layer_follows_the_formula_with_every_predictor(name, kind):
    similarity = DYNAMIC_SIMILARITIES[KINDS.index(kind) % len(DYNAMIC_SIMILARITIES)]
    check_dynamic(name, SIMILARITIES[similarity], kind, SOME_GEOMETRIES)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("conv1d", "full_sphere"),
        ("conv2d", "shared"),
        ("conv3d", "own_per_example"),
        ("depthwise_conv2d", "sphere"),
    ],
)
def test_dynamic_layer_with_channels_first_follows_the_formula(name, kind):
    similarity = SIMILARITIES["unconstrained"]
    # Volumes are slow this way.
    geometries = SOME_GEOMETRIES[:1] if name == "conv3d" else SOME_GEOMETRIES
    check_dynamic(name, similarity, kind, geometries, "channels_first")


@each_layer
def test_predictor_runs_in_the_mode_of_the_layer(name):
    member = FAMILY[name]
    layer = member.make_built(kernel_size=(2, 3, 2), predictor="sphere")
    inference = ops.convert_to_numpy(layer(member.tensor()))
    with keras.StatelessScope():
        training = ops.convert_to_numpy(layer(member.tensor(), training=True))
    assert np.max(np.abs(training - inference)) > 0.01


# Causality.


@pytest.mark.parametrize(
    ("kind", "data_format"),
    [
        (None, "channels_first"),
        ("sphere", "channels_last"),
        ("full_sphere", "channels_first"),
        ("shared", "channels_last"),
        ("in_blocks", "channels_last"),
    ],
)
def test_causal_layer_never_looks_ahead(kind, data_format):
    member = FAMILY["conv1d"]
    first = data_format == "channels_first"
    dilated = [] if kind == "in_blocks" else [{"dilation_rate": 2}]
    for options in ({}, {"strides": 2}, *dilated):
        geometry = {
            "kernel_size": 3,
            "padding": "causal",
            "data_format": data_format,
            **options,
        }
        similarity = SIMILARITIES["unconstrained"]
        predictor = None
        if kind is not None:
            predictor = make_predictor(kind, member, similarity, "float32", geometry)
        layer = member.make_built(similarity=similarity, predictor=predictor, **geometry)
        inputs = member.tensor(data_format=data_format)
        before = channels_last(layer(inputs), data_format)
        changed = np.array(ops.convert_to_numpy(inputs))
        changed[(slice(None), slice(None), 6) if first else (slice(None), 6)] += 1.0
        after = channels_last(layer(ops.convert_to_tensor(changed)), data_format)
        # Position p stands at step p * strides.
        earlier = 6 // options.get("strides", 1)
        assert_close(after[:, :earlier], before[:, :earlier], 1e-6, geometry)
        assert np.max(np.abs(after - before)[:, earlier:]) > 0.01


def test_errors_of_predictors_that_look_ahead():
    def build(predictor):
        layer = NeuralSimilarityConv1D(6, 3, padding="causal", predictor=predictor)
        layer.build((None, 11, 4))

    for kind in (SimilarityPredictor, SharedSimilarityPredictor):
        message = r"`predictor` must have padding='causal'.*predictor.padding='same'"
        with pytest.raises(ValueError, match=message):
            build(kind(padding="same"))
        message = r"must not be pooled in a causal layer.*predictor.pooled=True"
        with pytest.raises(ValueError, match=message):
            build(kind(pooled=True))


# Gradients.


@pytest.mark.parametrize(
    ("name", "similarity"),
    [
        *(("conv2d", similarity) for similarity in SIMILARITIES),
        ("conv1d", "full"),
        ("conv3d", "unconstrained"),
        ("depthwise_conv2d", "positive_semidefinite"),
    ],
)
def test_gradients_of_the_static_layer(name, similarity):
    member, dtype = FAMILY[name], DTYPES[0]
    geometry = SOME_GEOMETRIES[list(SIMILARITIES).index(similarity) % 2]
    layer = member.make_built(similarity=SIMILARITIES[similarity], dtype=dtype, **geometry)
    assert [v.name for v in layer.trainable_variables] == ["kernel", "bias", "similarity"]
    # Of the second degree in each of them at most, so that central differences are exact
    # at any step; but a sparse matrix jumps, see tests/similarity/test_matrices.
    skip = ["similarity"] if similarity.startswith("sparse") else []
    tolerance = {"float64": 1e-10, "float32": 1e-4}[dtype]
    check_gradients(layer, member.tensor(dtype), dtype, 0.5, tolerance, skip=skip)


@pytest.mark.skipif("float64" not in DTYPES, reason="needs float64")
@pytest.mark.parametrize(
    ("name", "similarity", "kind", "options", "training"),
    [
        ("conv2d", "diagonal", "sphere", {"padding": "same"}, True),
        ("conv2d", "unconstrained", "full_sphere", {"padding": "same"}, True),
        ("conv2d", "symmetric", "cnn", {"dilation_rate": 2}, True),
        ("conv2d", "positive_semidefinite", "shared", {"padding": "same"}, False),
        ("conv1d", "unconstrained", "sphere", {"padding": "causal"}, False),
        ("conv3d", "diagonal", "pooled", {"strides": 2}, True),
        ("conv2d", "diagonal", "in_blocks", {"strides": (1, 2)}, True),
        ("depthwise_conv2d", "diagonal", "sphere", {"strides": (2, 1)}, True),
        ("depthwise_conv2d", "positive_semidefinite", "own", {"padding": "same"}, False),
    ],
    ids=str,
)
def test_gradients_of_the_dynamic_layer(name, similarity, kind, options, training):
    member, similarity = FAMILY[name], SIMILARITIES[similarity]
    geometry = {"kernel_size": (2, 3, 2), **options}
    predictor = make_predictor(kind, member, similarity, "float64", geometry)
    layer = member.make_built(
        similarity=similarity, predictor=predictor, dtype="float64", **geometry
    )
    if training:
        # In inference mode no batch norm spreads what the second convolution sees.
        assert layer.predictor.non_trainable_variables
    check_gradients(layer, member.tensor("float64"), "float64", 1e-6, 1e-5, training)


@pytest.mark.parametrize(
    ("kind", "value"), [("sphere", 0.0), ("full_sphere", 0.7), ("cnn", 0.0)]
)
def test_second_derivatives_on_a_constant_image_are_finite(value, kind):
    layer = NeuralSimilarityConv2D(3, 3, padding="same", predictor=kind)
    images = value * ops.ones((2, 5, 4, 3))
    layer.build(images.shape)

    def squared_slope(images):
        slopes = gradients(
            lambda images: ops.sum(ops.square(layer(images, training=True))),
            [images],
            [layer.kernel],
        )
        return sum(ops.sum(ops.square(slope)) for slope in slopes)

    assert np.all(np.isfinite(ops.convert_to_numpy(layer(images))))
    for gradient in gradients(squared_slope, [images], layer.trainable_variables):
        assert np.all(np.isfinite(ops.convert_to_numpy(gradient)))


# Folding.


@pytest.mark.parametrize(
    ("name", "similarity", "dtype", "data_format"),
    [
        *((*each, DTYPES[0], "channels_last") for each in LAYERS_AND_SIMILARITIES),
        *((name, "symmetric", "mixed_bfloat16", "channels_last") for name in FAMILY),
        ("conv2d", "symmetric", "float32", "channels_first"),
        ("depthwise_conv2d", "symmetric", "float32", "channels_first"),
    ],
)
def test_fold_computes_the_same(name, similarity, dtype, data_format):
    member = FAMILY[name]
    inputs = member.tensor(data_format=data_format)
    groups = (name, similarity) in (("conv2d", "unconstrained"), ("conv2d", "full"))
    for geometry in [
        *SOME_GEOMETRIES,
        *([{"kernel_size": 2, "groups": 2}] if groups else []),
        *([{"kernel_size": 4, "padding": "causal"}] if member.rank == 1 else []),
    ]:
        # A kernel of one live entry would live or die with its tap.
        learn_shape = "strides" in geometry and similarity != "sparse_of_1"
        layer = member.make_built(
            similarity=SIMILARITIES[similarity],
            data_format=data_format,
            activation="tanh",
            learn_shape=learn_shape,
            dtype=dtype,
            **geometry,
        )
        if learn_shape:
            layer.shape_parameters.assign(np.linspace(0.8, 0.3, layer.taps))
        before = values(layer.variables)
        outputs = layer(inputs)
        plain = layer.fold()
        assert type(plain) is member.plain
        # Far below the rounding of bfloat16: the equivalent kernel is rounded once, as
        # the plain layer rounds its own.
        tolerance = 1e-12 if dtype == "float64" else 1e-6
        assert_close(plain(inputs), outputs, tolerance, geometry)
        for old, new in zip(before, values(layer.variables), strict=True):
            np.testing.assert_array_equal(new, old)
        # A comparison that another `M` passes would show nothing.
        layer.similarity_parameters.assign(layer.similarity_parameters * 1.5 + 0.1)
        with pytest.raises(AssertionError, match="relative error"):
            assert_close(plain(inputs), layer(inputs), 0.01)


def test_fold_keeps_what_the_layer_is():
    for name, member in FAMILY.items():
        layer = member.make(
            kernel_size=3,
            strides=2,
            activation="relu",
            activity_regularizer=keras.regularizers.L1(0.1),
            name="third",
            dtype="mixed_bfloat16",
            trainable=False,
        )
        layer.build(member.inputs.shape)
        config, plain = layer.get_config(), layer.fold().get_config()
        assert {key: config[key] for key in plain} == plain, name


def train(layer, inputs):
    """A step of `fit`; every weight of the layer has moved afterwards."""
    before = values(layer.trainable_variables)
    inputs = ops.convert_to_numpy(inputs)
    targets = np.zeros(layer.compute_output_shape(inputs.shape))
    model = keras.Sequential([layer])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    model.fit(inputs, targets, verbose=0)
    for old, new in zip(before, values(layer.trainable_variables), strict=True):
        assert np.mean(old != new) > 0.9


@pytest.mark.jax
@one_layer_of_a_kind
def test_fold_and_layer_are_independent_in_training(name):
    member = FAMILY[name]
    layer = member.make_built(kernel_size=2)
    plain = layer.fold()
    inputs = member.tensor()
    common = ops.convert_to_numpy(layer(inputs))
    train(plain, inputs)
    np.testing.assert_array_equal(ops.convert_to_numpy(layer(inputs)), common)
    plain = layer.fold()
    train(layer, inputs)
    assert_close(plain(inputs), common, 1e-6)


# How far a batch goes.


@pytest.mark.parametrize(
    ("predictor", "functions", "files"), [(None, 5, 3), ("sphere", 10, 5)]
)
def test_a_batch_passes_through_few_functions(predictor, functions, files):
    layer = FAMILY["conv2d"].make_built(predictor=predictor)
    inputs = FAMILY["conv2d"].tensor()
    layer(inputs)
    passed = set()

    def note(frame, event, _):
        code = frame.f_code
        ours = "/nsl_keras/similarity/" in code.co_filename
        if event == "call" and ours and not code.co_name.startswith("<"):
            passed.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    layer(inputs)
    sys.setprofile(None)
    assert len(passed) <= functions, passed
    assert len({file for file, _ in passed}) <= files, passed


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"similarity": "diag"},
            r"`similarity` must be one of 'diagonal', 'unconstrained'.*'diag'",
        ),
        (
            {"predictor": "other"},
            r"`predictor` must be None, one of 'sphere', 'full_sphere', 'cnn'.*'other'",
        ),
        ({"predictor": 3}, r"`predictor` must be None, one of .*predictor=3"),
        ({"predictor": np.ones(3)}, r"`predictor` must be None, .*predictor=array"),
        ({"predictor": {"a": 1}}, r"`predictor` must be None, .*predictor=\{'a': 1\}"),
        (
            {"similarity_regularizer": "l1", "predictor": "sphere"},
            r"`similarity_regularizer` and .* must be None with a predictor.*L1",
        ),
        (
            {"similarity_constraint": "non_neg", "predictor": "sphere"},
            r"`similarity_constraint` .* must be None with a predictor.*NonNeg",
        ),
        (
            {"similarity_initializer": "glorot_uniform", "predictor": "sphere"},
            r"`similarity_initializer` .* must be 'identity' with a predictor.*Glorot",
        ),
        (
            {"similarity": "sparse", "predictor": "sphere"},
            r"`similarity` 'Sparse' is static and takes no predictor.*sphere",
        ),
        (
            {"groups": 2, "predictor": "sphere"},
            r"`groups` must be 1 with a predictor.*groups=2, predictor=",
        ),
    ],
    ids=lambda value: name_of(value) if isinstance(value, dict) else "",
)
def test_errors_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        FAMILY["conv2d"].make(**{"kernel_size": 3, **options})


@each_predictor
@each_layer
def test_errors_of_inputs(name, predictor):
    """Keras's own errors; what counts is that there is one."""
    member = FAMILY[name]
    layer = member.make(kernel_size=3, predictor=predictor)
    layer(member.tensor())
    for rank in (member.rank + 1, member.rank + 3):
        with pytest.raises(ValueError, match=r"min_ndim|must have the same length"):
            layer(ops.ones((4,) * rank))
    with pytest.raises(ValueError, match=r"expected axis -1 of input shape .* value 4"):
        layer(ops.concatenate([member.tensor()] * 2, axis=-1))
    with pytest.raises(ValueError, match=r"zero or negative"):
        layer(member.tensor()[:, :2])
    with pytest.raises(ValueError, match=r"negative"):
        member.make(kernel_size=20, predictor=predictor)(member.tensor())


@pytest.mark.parametrize(
    ("predictor", "received"),
    [
        (lambda: keras.layers.Conv2D(81, 3), r"\(2, 7, 9, 81\)"),
        (lambda: keras.layers.Conv2D(9, 3, padding="same"), r"\(2, 9, 11, 9\)"),
        (lambda: keras.layers.Flatten(), r"\(2, 396\)"),
        (
            lambda: SimilarityPredictor(similarity="unconstrained"),
            r"\(2, 7, 9, 81\)",
        ),
        (lambda: SharedSimilarityPredictor(2), r"\(2, 7, 9, 4\)"),
    ],
    ids=["outputs", "positions", "rank", "similarity", "taps_of_shared"],
)
@one_layer_of_a_kind
def test_error_of_a_predictor_with_another_output_shape(name, predictor, received):
    layer = FAMILY[name].make(kernel_size=3, predictor=predictor())
    expected = r"`predictor` must map .* of shape \(2, 7, 9, 9\) or \(2, 9\)"
    with pytest.raises(ValueError, match=rf"{expected}.*Received: .* {received}"):
        layer(FAMILY[name].tensor())


@pytest.mark.parametrize(
    ("predictor", "message"),
    [
        (SimilarityPredictor(2), r"kernel_size=\(3, 3\).*kernel_size=\(2, 2\)"),
        (SimilarityPredictor(3, strides=2), r"strides=\(1, 1\).*strides=\(2, 2\)"),
        (
            SimilarityPredictor(data_format="channels_first"),
            r"data_format='channels_last'.*data_format='channels_first'",
        ),
        (
            SharedSimilarityPredictor(data_format="channels_first"),
            r"data_format='channels_last'.*data_format='channels_first'",
        ),
    ],
    ids=["kernel_size", "strides", "data_format", "data_format_of_shared"],
)
def test_error_of_a_predictor_with_another_geometry(predictor, message):
    layer = NeuralSimilarityConv2D(6, 3, predictor=predictor)
    with pytest.raises(ValueError, match=rf"`predictor` must have {message}"):
        layer.build((None, 9, 8, 4))


def test_error_of_a_full_similarity_in_a_depthwise_layer():
    message = r"`similarity` must be shared by all channels in a depthwise .*'Full'"
    with pytest.raises(ValueError, match=message):
        FAMILY["depthwise_conv2d"].make(kernel_size=3, similarity="full")
