"""Convolutions with a neural similarity, against Keras's own and against the formula."""

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
CONVOLUTIONS = [name for name in FAMILY if not FAMILY[name].depthwise]
DTYPES_AND_FORMATS = [
    *((dtype, "channels_last") for dtype in (*DTYPES, "mixed_bfloat16")),
    ("float32", "channels_first"),
]

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
    all_of_them = (dtype, data_format) == ("float32", "channels_last")
    for geometry in member.geometries() if all_of_them else SOME_GEOMETRIES:
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


@pytest.mark.parametrize("dtype", DTYPES)
@each_layer_and_similarity
def test_every_similarity_starts_from_the_plain_kernel(name, similarity, dtype):
    member = FAMILY[name]
    layer = member.make(
        kernel_size=(2, 3, 2), similarity=SIMILARITIES[similarity], dtype=dtype
    )
    layer.build(member.inputs.shape)
    size = layer.similarity_matrix.shape[0]
    nonzeros = getattr(layer.similarity, "nonzeros", None) or size
    matrix = ops.convert_to_numpy(layer.similarity_matrix)
    if nonzeros >= size:
        assert_equal(matrix, np.eye(size))
        assert_equal(layer.equivalent_kernel, layer.kernel)
    else:
        # Fewer entries than the identity has: those nearest to the centre.
        assert np.count_nonzero(matrix) == nonzeros
        assert np.trace(matrix) == nonzeros


@each_layer
def test_static_layer_starts_as_the_plain_layer_with_activation(name):
    member = FAMILY[name]
    for activation, use_bias, data_format in (
        ("relu", True, "channels_last"),
        ("softmax", False, "channels_first"),
    ):
        inputs = member.tensor(data_format=data_format)
        options = {
            "kernel_size": 3,
            "activation": activation,
            "use_bias": use_bias,
            "data_format": data_format,
        }
        layer = member.make(**options)
        outputs = layer(inputs)
        plain = member.plain(**member.options(**options))
        plain.build(inputs.shape)
        plain.kernel.assign(layer.kernel)
        assert (layer.bias is None) is not use_bias
        assert_equal(outputs, plain(inputs))


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
    for geometry in member.geometries(groups=groups):
        if similarity == "sparse_of_3" and geometry["kernel_size"] == 1:
            continue
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
        *((name, "diagonal") for name in FAMILY if name != "conv2d"),
        ("conv1d", "positive_semidefinite"),
        ("conv3d", "symmetric"),
        ("depthwise_conv2d", "unconstrained"),
    ],
)
def test_dynamic_layer_follows_the_formula(name, similarity):
    geometries = FAMILY[name].geometries(dynamic=True)
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
        ("conv2d", "full_sphere"),
        ("conv2d", "shared"),
        ("conv2d", "own_per_example"),
        ("conv3d", "own_per_example"),
        ("depthwise_conv2d", "shared"),
    ],
)
def test_dynamic_layer_with_channels_first_follows_the_formula(name, kind):
    similarity = SIMILARITIES["unconstrained"]
    # Volumes are slow this way.
    geometries = SOME_GEOMETRIES[:1] if name == "conv3d" else SOME_GEOMETRIES
    check_dynamic(name, similarity, kind, geometries, "channels_first")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("conv2d", kind) for kind in KINDS),
        ("conv1d", "sphere"),
        ("conv3d", "shared_pooled"),
        ("depthwise_conv2d", "full_sphere"),
    ],
)
def test_dynamic_layer_with_a_prediction_of_zeros_is_the_plain_layer(name, kind):
    member = FAMILY[name]
    similarity = SIMILARITIES["positive_semidefinite"]
    geometry = {"kernel_size": (2, 3, 2), "padding": "same", "strides": 2}
    predictor = make_predictor(kind, member, similarity, "float32", geometry)
    layer = member.make_built(similarity=similarity, predictor=predictor, **geometry)
    last = getattr(layer.predictor, "output_convolution", layer.predictor)
    last = last.layers[-1] if isinstance(last, keras.Sequential) else last
    last.kernel.assign(np.zeros(last.kernel.shape))
    if last.bias is not None:
        last.bias.assign(np.zeros(last.bias.shape))
    normalization = getattr(layer.predictor, "output_normalization", None)
    if normalization is not None:
        for variable in (normalization.beta, normalization.moving_mean):
            variable.assign(np.zeros(variable.shape))
    plain = member.plain(**member.options(**geometry))
    plain.build(member.inputs.shape)
    plain.kernel.assign(layer.kernel)
    plain.bias.assign(layer.bias)
    assert_close(layer(member.tensor()), plain(member.tensor()), 1e-5)


@pytest.mark.parametrize("per_example", [False, True])
@pytest.mark.parametrize(
    ("name", "similarity"),
    [
        *(("conv2d", similarity) for similarity in DYNAMIC_SIMILARITIES),
        ("conv1d", "unconstrained"),
        ("conv3d", "diagonal"),
        ("depthwise_conv2d", "symmetric"),
    ],
)
def test_dynamic_layer_with_a_constant_prediction_is_the_static_layer(
    name, similarity, per_example
):
    member, similarity = FAMILY[name], SIMILARITIES[similarity]
    geometry = {"kernel_size": (2, 3, 2), "strides": 2}
    static = member.make_built(similarity=similarity, **geometry)
    constant = ops.convert_to_numpy(static.similarity_parameters)
    constant = constant - identity_parameters(similarity, static.taps)
    kind = "own_per_example" if per_example else "own"
    predictor = make_predictor(kind, member, similarity, "float32", geometry)
    dynamic = member.make(similarity=similarity, predictor=predictor, **geometry)
    dynamic.build(member.inputs.shape)
    last = predictor.layers[-1] if per_example else predictor
    last.activation = keras.activations.linear
    last.kernel.assign(np.zeros(last.kernel.shape))
    last.bias.assign(constant.reshape(-1))
    dynamic.kernel.assign(static.kernel)
    dynamic.bias.assign(static.bias)
    assert_close(dynamic(member.tensor()), static(member.tensor()), 1e-5)


@each_layer
def test_predictor_runs_in_the_mode_of_the_layer(name):
    member = FAMILY[name]
    layer = member.make_built(kernel_size=(2, 3, 2), predictor="sphere")
    inference = ops.convert_to_numpy(layer(member.tensor()))
    with keras.StatelessScope():
        training = ops.convert_to_numpy(layer(member.tensor(), training=True))
    assert np.max(np.abs(training - inference)) > 0.01


# Causality.


@pytest.mark.parametrize("kind", [None, "sphere", "full_sphere", "cnn", "shared", "own"])
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_causal_layer_never_looks_ahead(kind, data_format):
    member = FAMILY["conv1d"]
    first = data_format == "channels_first"
    for options in ({}, {"dilation_rate": 2}, {"strides": 2}):
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
    message = r"`predictor` must have padding='causal'.*predictor.padding='same'"
    for predictor in (
        SimilarityPredictor((3,), padding="same"),
        SharedSimilarityPredictor((3,)),
    ):
        layer = NeuralSimilarityConv1D(6, 3, padding="causal", predictor=predictor)
        with pytest.raises(ValueError, match=message):
            layer.build((None, 11, 4))
    message = r"`predictor` must not be pooled in a causal layer.*predictor.pooled=True"
    for predictor in (
        SimilarityPredictor((3,), padding="causal", pooled=True),
        SharedSimilarityPredictor((3,), padding="causal", pooled=True),
    ):
        layer = NeuralSimilarityConv1D(6, 3, padding="causal", predictor=predictor)
        with pytest.raises(ValueError, match=message):
            layer.build((None, 11, 4))


# Gradients.


@each_layer_and_similarity
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


@pytest.mark.parametrize("kind", ["sphere", "full_sphere", "cnn"])
@pytest.mark.parametrize("value", [0.0, 0.7])
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
        *(
            (name, "symmetric", *each)
            for name in FAMILY
            for each in DTYPES_AND_FORMATS[1:]
            if name in ("conv2d", "depthwise_conv2d") or each[0] == "mixed_bfloat16"
        ),
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
    options = {
        "strides": 2,
        "padding": "same",
        "activation": "relu",
        "use_bias": False,
        "activity_regularizer": keras.regularizers.L1(0.1),
        "name": "third",
        "dtype": "mixed_bfloat16",
        "trainable": False,
    }
    for name, member in FAMILY.items():
        kernel = "depthwise" if member.depthwise else "kernel"
        layer = member.make(
            kernel_size=3,
            **options,
            **{
                f"{kernel}_regularizer": keras.regularizers.L2(0.1),
                f"{kernel}_constraint": "non_neg",
            },
        )
        layer.build(member.inputs.shape)
        plain = layer.fold()
        assert plain.name == "third", name
        assert plain.dtype_policy.name == "mixed_bfloat16"
        assert plain.trainable is False
        assert plain.trainable_variables == []
        assert plain.activation is keras.activations.relu
        assert plain.use_bias is False
        assert plain.bias is None
        assert plain.strides == (2,) * member.rank
        assert float(plain.kernel.regularizer.l2) == pytest.approx(0.1)
        assert float(plain.activity_regularizer.l1) == pytest.approx(0.1)
        assert isinstance(plain.kernel.constraint, keras.constraints.NonNeg)
        assert plain.kernel.dtype == "float32"


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


@pytest.mark.parametrize(
    "attribute", ["kernel", "similarity_parameters", "shape_parameters", "bias"]
)
@one_layer_of_a_kind
def test_fold_is_a_snapshot(name, attribute):
    member = FAMILY[name]
    layer = member.make_built(similarity="symmetric", learn_shape=True, kernel_size=2)
    layer.shape_parameters.assign(np.ones(layer.taps))
    plain = layer.fold()
    inputs = member.tensor()
    common = ops.convert_to_numpy(plain(inputs))
    variable = getattr(layer, attribute)
    variable.assign(variable * np.linspace(0.4, 1.5, variable.shape[0])[-1] - 0.6)
    np.testing.assert_array_equal(ops.convert_to_numpy(plain(inputs)), common)
    if attribute == "shape_parameters":
        variable.assign(np.arange(layer.taps) % 2)
    assert np.max(np.abs(ops.convert_to_numpy(layer(inputs)) - common)) > 0.01
    # Folding anew catches up.
    assert_close(layer.fold()(inputs), layer(inputs), 1e-6)


# Errors.


@pytest.mark.parametrize("value", [0, -3, 3.0, "3", "33", (3, 3, 3, 3), (3, 0), True])
@each_layer
def test_errors_of_the_kernel_size(name, value):
    message = rf"`kernel_size` must be a positive integer or {FAMILY[name].rank} of them"
    with pytest.raises(ValueError, match=message):
        FAMILY[name].layer(**{**FAMILY[name].options(), "kernel_size": value})


@pytest.mark.parametrize("value", [0, 6.0, "6", None, True])
@each_layer
def test_errors_of_the_number_of_filters(name, value):
    (argument,) = FAMILY[name].options()
    message = rf"`{argument}` must be a positive integer.*{argument}="
    with pytest.raises(ValueError, match=message):
        FAMILY[name].layer(**{"kernel_size": 3, argument: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strides": 0}, r"`strides` must be a positive integer.*strides=0"),
        ({"strides": 1.5}, r"`strides` must be .*strides=1.5"),
        ({"dilation_rate": 0}, r"`dilation_rate` must be .*dilation_rate=0"),
        (
            {"strides": 2, "dilation_rate": 2},
            r"`strides` and `dilation_rate` .*strides=2, dilation_rate=2",
        ),
        ({"padding": "full"}, r"`padding` must be one of 'valid', 'same'.*'full'"),
        ({"padding": 1}, r"`padding` must be one of 'valid', 'same'.*padding=1"),
        ({"padding": np.ones(3)}, r"`padding` must be one of 'valid', 'same'.*array"),
        (
            {"data_format": "NCHW"},
            r"`data_format` must be one of 'channels_last', 'channels_first'.*'NCHW'",
        ),
        (
            {"similarity": "diag"},
            r"`similarity` must be one of 'diagonal', 'unconstrained'.*'diag'",
        ),
        ({"similarity": None}, r"`similarity` must be one of .*similarity=None"),
        ({"similarity": np.eye(9)}, r"`similarity` must be one of .*similarity=array"),
        (
            {"predictor": "mlp"},
            r"`predictor` must be None, one of 'sphere', 'full_sphere', 'cnn'.*'mlp'",
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
            r"`similarity` 'Sparse' is static and takes no predictor.*'sphere'",
        ),
        (
            {"similarity": "full", "predictor": "sphere"},
            r"`similarity` 'Full' is static and takes no predictor.*'sphere'",
        ),
        *(
            (
                {"learn_shape": True, "shape_threshold": value},
                r"`shape_threshold` must be a number in \[0, 1\).*shape_threshold=",
            )
            for value in (1.0, -0.1, "0.5", None)
        ),
    ],
    ids=lambda value: name_of(value) if isinstance(value, dict) else "",
)
@each_layer
def test_errors_at_construction(name, options, message):
    with pytest.raises(ValueError, match=message):
        FAMILY[name].make(**{"kernel_size": 3, **options})


@pytest.mark.parametrize("name", [name for name in FAMILY if name != "conv1d"])
def test_error_of_causal_padding_along_several_axes(name):
    message = r"`padding` must be one of 'valid', 'same'\. .*'causal'"
    with pytest.raises(ValueError, match=message):
        FAMILY[name].make(kernel_size=3, padding="causal")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 0}, r"`groups` must be a positive integer.*groups=0"),
        ({"groups": 8}, r"`filters` must be divisible by `groups`.*filters=12, groups=8"),
        (
            {"groups": 2, "predictor": "sphere"},
            r"`groups` must be 1 with a predictor.*groups=2, predictor='sphere'",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_errors_of_groups(name, options, message):
    with pytest.raises(ValueError, match=message):
        FAMILY[name].make(kernel_size=3, **options)
    layer = FAMILY[name].make(kernel_size=3, groups=3)
    with pytest.raises(ValueError, match=r"divisible by `groups`.*, 4\), groups=3"):
        layer.build(FAMILY[name].inputs.shape)


@each_layer
def test_errors_at_build(name):
    member = FAMILY[name]
    sizes = [7] * member.rank
    unknown = r"channel axis of the input must be known.*None"
    with pytest.raises(ValueError, match=unknown):
        member.make(kernel_size=3).build((None, *sizes, None))
    with pytest.raises(ValueError, match=unknown):
        member.make(kernel_size=3, data_format="channels_first").build((None, None, *sizes))
    small = r"`kernel_size` .* must not exceed the spatial size.*{}=\({}.*input_shape=\(N"
    for options, argument, value in (
        ({"kernel_size": 8}, "kernel_size", 8),
        ({"kernel_size": 3, "dilation_rate": 4}, "dilation_rate", 4),
        ({"kernel_size": 8, "predictor": "cnn"}, "kernel_size", 8),
    ):
        with pytest.raises(ValueError, match=small.format(argument, value)):
            member.make(**options).build((None, *sizes, 4))
    for rank in (member.rank - 1, member.rank + 1):
        with pytest.raises(ValueError, match=rf"must have rank {member.rank + 2}"):
            member.make(kernel_size=3).build((None, *[7] * rank, 4))


@each_layer
def test_kernel_above_the_input_is_fine_with_same_padding(name):
    member = FAMILY[name]
    sizes = (2, 3, 1)[: member.rank]
    for predictor in (None, "sphere"):
        layer = member.make(kernel_size=3, padding="same", predictor=predictor)
        assert tuple(layer(ops.ones((1, *sizes, 4))).shape) == (1, *sizes, FILTERS)


@pytest.mark.parametrize(
    ("name", "predictor"), [*((name, None) for name in FAMILY), ("conv2d", "sphere")]
)
def test_errors_of_inputs(name, predictor):
    member = FAMILY[name]
    layer = member.make(kernel_size=3, predictor=predictor)
    for rank in (member.rank + 1, member.rank + 3):
        message = rf"expected ndim={member.rank + 2}, found ndim={rank}"
        with pytest.raises(ValueError, match=message):
            layer(ops.ones((5,) * rank))
    for data_format, axis in (("channels_last", -1), ("channels_first", 1)):
        layer = member.make(kernel_size=2, predictor=predictor, data_format=data_format)
        inputs = member.tensor(data_format=data_format)
        layer(inputs)
        message = rf"expected axis {axis} of input shape .* value 4"
        with pytest.raises(ValueError, match=message):
            layer(ops.concatenate([inputs, inputs], axis=axis))
    layer = member.make(kernel_size=3, predictor=predictor)
    layer(member.tensor())
    with pytest.raises(ValueError, match=r"must not exceed the spatial size"):
        layer(member.tensor()[:, :2])


@pytest.mark.parametrize(
    ("predictor", "received"),
    [
        (lambda: keras.layers.Conv2D(8, 3), r"\(2, 7, 9, 8\)"),
        (lambda: keras.layers.Conv2D(81, 3), r"\(2, 7, 9, 81\)"),
        (lambda: keras.layers.Conv2D(9, 3, padding="same"), r"\(2, 9, 11, 9\)"),
        (lambda: keras.layers.Flatten(), r"\(2, 396\)"),
        (lambda: SimilarityPredictor(2), r"\(2, 8, 10, 4\)"),
        (lambda: SimilarityPredictor(2, pooled=True), r"\(2, 4\)"),
        (lambda: SimilarityPredictor(3, strides=2), r"\(2, 4, 5, 9\)"),
        (lambda: SimilarityPredictor(3, similarity="unconstrained"), r"\(2, 7, 9, 81\)"),
        (lambda: SharedSimilarityPredictor(2), r"\(2, 7, 9, 4\)"),
    ],
    ids=[
        "too_few",
        "too_many",
        "other_positions",
        "other_rank",
        "other_taps",
        "other_taps_pooled",
        "other_strides",
        "other_similarity",
        "other_taps_shared",
    ],
)
@pytest.mark.parametrize("name", ["conv2d", "depthwise_conv2d"])
def test_error_of_a_predictor_with_another_output_shape(name, predictor, received):
    layer = FAMILY[name].make(kernel_size=3, predictor=predictor())
    expected = r"`predictor` must map .* of shape \(2, 7, 9, 9\) .* of shape \(2, 9\)"
    with pytest.raises(ValueError, match=rf"{expected}.*Received: .* {received}"):
        layer(FAMILY[name].tensor())


def test_error_of_a_predictor_with_another_data_format():
    for predictor in (
        SimilarityPredictor(3, data_format="channels_first"),
        SharedSimilarityPredictor(3, data_format="channels_first"),
    ):
        layer = NeuralSimilarityConv2D(6, 3, predictor=predictor)
        message = r"must have data_format='channels_last'.*data_format='channels_first'"
        with pytest.raises(ValueError, match=message):
            layer.build((None, 9, 8, 4))
