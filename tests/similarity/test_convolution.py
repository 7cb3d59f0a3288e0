"""Convolutions with a neural similarity, against Keras's own and against the formula."""

import keras
import numpy as np
import numpy_reference
import pytest
from golden_files import DTYPES, gradients
from keras import ops

from nsl_keras import similarities
from nsl_keras.layers import NeuralSimilarityConv2D

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
RNG = np.random.default_rng(5)
IMAGES = RNG.normal(size=(2, 9, 11, 4))

GEOMETRIES = [
    {},
    {"strides": 2},
    {"strides": (3, 1)},
    {"dilation_rate": 2},
    {"dilation_rate": (1, 3)},
]


DATA_FORMATS = ("channels_last", "channels_first")


def name_of(options):
    return "-".join(f"{name}={value}" for name, value in options.items()) or "plain"


def assert_close(received, expected, tolerance, what=""):
    """Compares relative to the largest entry, and refuses all-zero expectations."""
    received = np.asarray(ops.convert_to_numpy(received)).astype("float64")
    expected = np.asarray(ops.convert_to_numpy(expected)).astype("float64")
    assert received.shape == expected.shape
    largest = np.max(np.abs(expected))
    assert largest > 0
    error = np.max(np.abs(received - expected)) / largest
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.1e} {what}"


def randomize(layer, seed=11, scale=0.5):
    """Gives every weight random values: ones and zeros would hide mistakes."""
    rng = np.random.default_rng(seed)
    for variable in layer.variables:
        noise = scale * rng.normal(size=variable.shape)
        if variable.path.endswith("moving_variance"):
            # Small ones, so that batch norms spread what they see.
            noise = 0.01 * (1 + np.abs(noise))
        variable.assign(noise)


def make_images(data_format="channels_last", dtype="float32"):
    images = np.moveaxis(IMAGES, -1, 1) if data_format == "channels_first" else IMAGES
    return ops.convert_to_tensor(images, dtype=dtype)


def channels_last(outputs, data_format):
    outputs = ops.convert_to_numpy(outputs)
    return np.moveaxis(outputs, 1, -1) if data_format == "channels_first" else outputs


# The static layer against Keras's Conv2D.


def compare_with_plain(similarity="diagonal", **options):
    # More filters than any width: where they are equal, Keras's own Conv2D adds the bias
    # along the width with channels first on TensorFlow (3.15).
    layer = NeuralSimilarityConv2D(
        12, bias_initializer="random_normal", similarity=similarity, **options
    )
    images = make_images(options.get("data_format"))
    outputs = layer(images)
    plain = keras.layers.Conv2D(12, **options)
    plain.build(images.shape)
    plain.kernel.assign(layer.kernel)
    if layer.bias is not None:
        plain.bias.assign(layer.bias)
    assert_close(outputs, plain(images), 1e-6, options)
    assert layer.compute_output_shape(images.shape) == tuple(outputs.shape)


@pytest.mark.parametrize("data_format", DATA_FORMATS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=name_of)
@pytest.mark.parametrize("kernel_size", [1, (2, 3), 3, (4, 4)], ids=str)
def test_static_layer_starts_as_conv2d(kernel_size, geometry, data_format):
    for padding in ("valid", "same"):
        compare_with_plain(
            kernel_size=kernel_size, padding=padding, data_format=data_format, **geometry
        )


@pytest.mark.parametrize("data_format", DATA_FORMATS)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=name_of)
def test_static_layer_with_groups_starts_as_conv2d(geometry, data_format):
    for padding in ("valid", "same"):
        compare_with_plain(
            kernel_size=(2, 3),
            padding=padding,
            groups=2,
            data_format=data_format,
            **geometry,
        )


@pytest.mark.parametrize("data_format", DATA_FORMATS)
@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
def test_static_layer_starts_as_conv2d_with_activation_and_bias(similarity, data_format):
    for activation in (None, "relu", "softmax"):
        for use_bias in (True, False):
            compare_with_plain(
                kernel_size=3,
                similarity=similarity,
                activation=activation,
                use_bias=use_bias,
                data_format=data_format,
            )


def test_bias_goes_along_the_channels_where_the_width_equals_the_filters():
    layer = NeuralSimilarityConv2D(
        6, 3, padding="same", data_format="channels_first", bias_initializer="normal"
    )
    images = ops.convert_to_tensor(RNG.normal(size=(2, 4, 5, 6)), dtype="float32")
    with_bias = ops.convert_to_numpy(layer(images))
    bias = np.array(ops.convert_to_numpy(layer.bias))
    layer.bias.assign(np.zeros(6))
    without = ops.convert_to_numpy(layer(images))
    assert_close(
        with_bias - without, np.broadcast_to(bias[:, None, None], (2, 6, 5, 6)), 1e-5
    )


# The formula of the design, in float64 loops.


def expected_outputs(layer, matrix, options):
    patches = numpy_reference.patches(
        IMAGES, **{name: value for name, value in options.items() if name != "groups"}
    )
    return numpy_reference.similarity_convolution(
        patches,
        ops.convert_to_numpy(layer.kernel),
        matrix,
        ops.convert_to_numpy(layer.bias),
        options.get("groups", 1),
    )


def to_matrix(similarity, parameters):
    """`M` of a similarity's parameters, without the package."""
    parameters = np.asarray(parameters, "float64")
    if similarity == "unconstrained":
        return parameters
    return parameters[..., None] * np.eye(parameters.shape[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=name_of)
def test_static_layer_follows_the_formula(geometry, similarity, dtype):
    for padding in ("valid", "same"):
        options = {"kernel_size": (2, 3), "padding": padding, **geometry}
        layer = NeuralSimilarityConv2D(6, similarity=similarity, dtype=dtype, **options)
        layer.build(IMAGES.shape)
        randomize(layer)
        parameters = ops.convert_to_numpy(layer.similarity_parameters)
        expected = expected_outputs(layer, to_matrix(similarity, parameters), options)
        outputs = layer(make_images(dtype=dtype))
        assert keras.backend.standardize_dtype(outputs.dtype) == dtype
        assert_close(outputs, expected, TOLERANCES[dtype], options)


@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
@pytest.mark.parametrize(
    "options",
    [{"groups": 2}, {"groups": 2, "padding": "same", "strides": 2}, {"padding": "same"}],
    ids=name_of,
)
def test_static_layer_with_channels_first_follows_the_formula(options, similarity):
    options = {"kernel_size": (2, 3), **options}
    layer = NeuralSimilarityConv2D(
        6, similarity=similarity, data_format="channels_first", **options
    )
    images = make_images("channels_first")
    layer.build(images.shape)
    randomize(layer)
    parameters = ops.convert_to_numpy(layer.similarity_parameters)
    expected = expected_outputs(layer, to_matrix(similarity, parameters), options)
    outputs = channels_last(layer(images), "channels_first")
    assert_close(outputs, expected, TOLERANCES["float32"])


def dynamic_layer(similarity, predictor, dtype, **options):
    """A dynamic layer with random weights, and its `M` at every position."""
    layer = NeuralSimilarityConv2D(
        6, similarity=similarity, predictor=predictor, dtype=dtype, **options
    )
    images = make_images(options.get("data_format"), dtype)
    layer.build(images.shape)
    randomize(layer)
    prediction = channels_last(layer.predictor(images), options.get("data_format"))
    taps = np.prod(numpy_reference.pair(options["kernel_size"]))
    if similarity == "unconstrained":
        prediction = prediction.reshape(*prediction.shape[:-1], taps, taps)
    matrix = np.eye(taps) + to_matrix(similarity, prediction)
    # A prediction that hardly varies would not show which position it belongs to.
    assert np.std(matrix, axis=(1, 2)).max() > 0.1
    return layer, images, matrix


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=name_of)
def test_dynamic_layer_follows_the_formula(geometry, similarity, dtype):
    for padding, predictor in (("valid", "cnn"), ("same", "sphere")):
        options = {"kernel_size": (2, 3), "padding": padding, **geometry}
        layer, images, matrix = dynamic_layer(similarity, predictor, dtype, **options)
        expected = expected_outputs(layer, matrix, options)
        outputs = layer(images)
        assert keras.backend.standardize_dtype(outputs.dtype) == dtype
        assert_close(outputs, expected, TOLERANCES[dtype], options)
        assert layer.compute_output_shape(images.shape) == tuple(outputs.shape)


@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
def test_dynamic_layer_with_channels_first_follows_the_formula(similarity):
    options = {"kernel_size": (2, 3), "padding": "same", "strides": 2}
    layer, images, matrix = dynamic_layer(
        similarity, "full_sphere", "float32", data_format="channels_first", **options
    )
    expected = expected_outputs(layer, matrix, options)
    assert_close(channels_last(layer(images), "channels_first"), expected, 1e-5)


@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
def test_dynamic_layer_with_a_constant_prediction_is_the_static_layer(similarity):
    static = NeuralSimilarityConv2D(6, 3, similarity=similarity)
    static.build(IMAGES.shape)
    randomize(static)
    parameters = ops.convert_to_numpy(static.similarity_parameters)
    identity = np.ones(9) if similarity == "diagonal" else np.eye(9)
    constant = keras.layers.Conv2D(
        parameters.size,
        3,
        kernel_initializer="zeros",
        bias_initializer=keras.initializers.Constant((parameters - identity).reshape(-1)),
    )
    dynamic = NeuralSimilarityConv2D(6, 3, similarity=similarity, predictor=constant)
    dynamic.build(IMAGES.shape)
    dynamic.kernel.assign(static.kernel)
    dynamic.bias.assign(static.bias)
    assert_close(dynamic(make_images()), static(make_images()), 1e-5)


def test_predictor_runs_in_the_mode_of_the_layer():
    layer = NeuralSimilarityConv2D(6, 3, predictor="sphere")
    layer.build(IMAGES.shape)
    randomize(layer)
    images = make_images()
    inference = ops.convert_to_numpy(layer(images))
    with keras.StatelessScope():
        training = ops.convert_to_numpy(layer(images, training=True))
    assert np.max(np.abs(training - inference)) > 0.01


# Gradients.


def check_gradients(layer, images, dtype, step, tolerance, training=None):
    """Central differences of a scalar of the output, along random directions."""
    cotangent = RNG.normal(size=layer.compute_output_shape(images.shape))

    def scalar(images):
        return ops.sum(layer(images, training=training) * ops.cast(cotangent, dtype))

    variables = layer.trainable_variables
    found = gradients(scalar, [images], variables)
    points = [images, *(ops.convert_to_tensor(v) for v in variables)]

    def value(at):
        mapping = list(zip(variables, at[1:], strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return float(ops.convert_to_numpy(scalar(at[0])))

    for index, (point, gradient) in enumerate(zip(points, found, strict=True)):
        name = "input" if index == 0 else variables[index - 1].path
        expected, received = [], []
        for _ in range(3):
            direction = RNG.normal(size=point.shape)
            shift = ops.cast(step * direction, dtype)
            above, below = list(points), list(points)
            above[index], below[index] = point + shift, point - shift
            expected.append((value(above) - value(below)) / (2 * step))
            gradient = np.asarray(ops.convert_to_numpy(gradient), "float64")
            received.append(np.sum(gradient * direction))
        assert_close(received, expected, tolerance, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
@pytest.mark.parametrize(
    "options",
    [{"padding": "same"}, {"strides": 2}, {"dilation_rate": 2, "padding": "same"}],
    ids=name_of,
)
def test_gradients_of_the_static_layer(options, similarity, dtype):
    layer = NeuralSimilarityConv2D(6, (2, 3), similarity=similarity, dtype=dtype, **options)
    images = make_images(dtype=dtype)
    layer.build(images.shape)
    randomize(layer)
    assert len(layer.trainable_variables) == 3
    # Linear in each of them, so that differences are exact at any step.
    check_gradients(layer, images, dtype, 0.5, {"float64": 1e-10, "float32": 1e-4}[dtype])


@pytest.mark.skipif("float64" not in DTYPES, reason="needs float64")
@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
@pytest.mark.parametrize(
    ("kind", "options", "training"),
    [
        ("sphere", {"padding": "same"}, True),
        ("sphere", {"strides": 2, "padding": "same"}, False),
        ("full_sphere", {"padding": "same"}, True),
        ("cnn", {"dilation_rate": 2}, True),
    ],
    ids=str,
)
def test_gradients_of_the_dynamic_layer(kind, options, training, similarity):
    layer = NeuralSimilarityConv2D(
        3, (2, 3), similarity=similarity, predictor=kind, dtype="float64", **options
    )
    images = make_images(dtype="float64")[:, :5, :6, :3]
    layer.build(images.shape)
    randomize(layer)
    check_gradients(layer, images, "float64", 1e-6, 1e-5, training)


@pytest.mark.parametrize("kind", ["sphere", "full_sphere", "cnn"])
@pytest.mark.parametrize("value", [0.0, 0.7])
def test_second_derivatives_on_a_constant_image_are_finite(value, kind):
    layer = NeuralSimilarityConv2D(3, 3, padding="same", predictor=kind)
    images = value * ops.ones((2, 5, 4, 3))
    layer.build(images.shape)
    variables = layer.trainable_variables

    def squared_slope(images):
        slopes = gradients(
            lambda images: ops.sum(ops.square(layer(images, training=True))),
            [images],
            [layer.kernel],
        )
        return sum(ops.sum(ops.square(slope)) for slope in slopes)

    assert np.all(np.isfinite(ops.convert_to_numpy(layer(images))))
    for gradient in gradients(squared_slope, [images], variables):
        assert np.all(np.isfinite(ops.convert_to_numpy(gradient)))


# Folding.


# TensorFlow has no float64 convolution with channels first on the CPU.
FOLD_CASES = [
    (dtype, data_format)
    for dtype in (*DTYPES, "mixed_bfloat16")
    for data_format in DATA_FORMATS
    if not (IS_TENSORFLOW and dtype == "float64" and data_format == "channels_first")
]


@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
@pytest.mark.parametrize(("dtype", "data_format"), FOLD_CASES)
@pytest.mark.parametrize(
    "options",
    [
        {"padding": "same"},
        {"padding": "same", "strides": 2},
        {"padding": "valid", "strides": (3, 1), "groups": 2},
        {"padding": "valid", "dilation_rate": (1, 2)},
    ],
    ids=name_of,
)
def test_fold_computes_the_same(options, dtype, data_format, similarity):
    layer = NeuralSimilarityConv2D(
        12,
        (2, 3),
        similarity=similarity,
        data_format=data_format,
        activation="tanh",
        dtype=dtype,
        **options,
    )
    images = make_images(data_format)
    layer.build(images.shape)
    randomize(layer)
    before = [ops.convert_to_numpy(v.value) for v in layer.variables]
    plain = layer.fold()
    assert type(plain) is keras.layers.Conv2D
    # Far below the rounding of bfloat16: the equivalent kernel is rounded once, as the
    # plain layer rounds its own.
    assert_close(plain(images), layer(images), 1e-6)
    for old, variable in zip(before, layer.variables, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(variable.value), old)


def test_fold_keeps_what_the_layer_is():
    layer = NeuralSimilarityConv2D(
        6,
        3,
        strides=2,
        padding="same",
        activation="relu",
        use_bias=False,
        kernel_regularizer=keras.regularizers.L2(0.1),
        kernel_constraint="non_neg",
        activity_regularizer=keras.regularizers.L1(0.1),
        name="third",
        dtype="mixed_bfloat16",
        trainable=False,
    )
    layer.build(IMAGES.shape)
    plain = layer.fold()
    assert plain.name == "third"
    assert plain.dtype_policy.name == "mixed_bfloat16"
    assert plain.trainable is False
    assert plain.trainable_variables == []
    assert plain.activation is keras.activations.relu
    assert plain.use_bias is False
    assert plain.bias is None
    assert plain.strides == (2, 2)
    assert float(plain.kernel_regularizer.l2) == pytest.approx(0.1)
    assert float(plain.activity_regularizer.l1) == pytest.approx(0.1)
    assert isinstance(plain.kernel_constraint, keras.constraints.NonNeg)
    assert plain.kernel.dtype == "float32"


def built_layer(similarity="diagonal"):
    layer = NeuralSimilarityConv2D(6, 3, similarity=similarity)
    layer.build(IMAGES.shape)
    randomize(layer)
    return layer


def train(layer):
    """A step of `fit`; every weight of the layer has moved afterwards."""
    before = [np.array(ops.convert_to_numpy(v.value)) for v in layer.trainable_variables]
    images = ops.convert_to_numpy(make_images())
    targets = np.zeros(layer.compute_output_shape(images.shape))
    model = keras.Sequential([layer])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    model.fit(images, targets, verbose=0)
    for old, variable in zip(before, layer.trainable_variables, strict=True):
        assert np.all(old != ops.convert_to_numpy(variable.value))


def test_fold_and_layer_are_independent_in_training():
    layer = built_layer()
    plain = layer.fold()
    images = make_images()
    common = ops.convert_to_numpy(layer(images))
    train(plain)
    np.testing.assert_array_equal(ops.convert_to_numpy(layer(images)), common)
    plain = layer.fold()
    train(layer)
    assert_close(plain(images), common, 1e-6)


@pytest.mark.parametrize("name", ["kernel", "similarity_parameters", "bias"])
def test_fold_is_a_snapshot(name):
    layer = built_layer("unconstrained")
    plain = layer.fold()
    images = make_images()
    common = ops.convert_to_numpy(plain(images))
    variable = getattr(layer, name)
    variable.assign(variable + 0.1)
    np.testing.assert_array_equal(ops.convert_to_numpy(plain(images)), common)
    assert np.max(np.abs(ops.convert_to_numpy(layer(images)) - common)) > 0.01
    # Folding anew catches up.
    assert_close(layer.fold()(images), layer(images), 1e-6)


@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
def test_equivalent_kernel(similarity):
    layer = built_layer(similarity)
    kernel = ops.convert_to_numpy(layer.kernel).astype("float64")
    matrix = to_matrix(similarity, ops.convert_to_numpy(layer.similarity_parameters))
    expected = np.einsum("tco,tu->uco", kernel.reshape(9, 4, 6), matrix)
    assert_close(layer.equivalent_kernel, expected.reshape(3, 3, 4, 6), 1e-6)


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"kernel_size": value}, r"`kernel_size` must be a positive integer or 2 of")
            for value in (0, -3, 3.0, "3", "33", (3,), (3, 3, 3), (3, 0), (3, 2.0), True)
        ),
        *(
            ({"filters": value}, r"`filters` must be a positive integer.*filters=")
            for value in (0, 6.0, "6", None, True)
        ),
        ({"strides": 0}, r"`strides` must be a positive integer.*strides=0"),
        ({"strides": (1, 1.5)}, r"`strides` must be .*strides=\(1, 1.5\)"),
        ({"dilation_rate": 0}, r"`dilation_rate` must be .*dilation_rate=0"),
        (
            {"strides": 2, "dilation_rate": (1, 2)},
            r"`strides` and `dilation_rate` .*strides=2, dilation_rate=\(1, 2\)",
        ),
        ({"groups": 0}, r"`groups` must be a positive integer.*groups=0"),
        ({"groups": 4}, r"`filters` must be divisible by `groups`.*filters=6, groups=4"),
        ({"padding": "causal"}, r"`padding` must be one of 'valid', 'same'.*'causal'"),
        ({"padding": 1}, r"`padding` must be one of 'valid', 'same'.*padding=1"),
        (
            {"data_format": "NCHW"},
            r"`data_format` must be one of 'channels_last', 'channels_first'.*'NCHW'",
        ),
        (
            {"similarity": "diag"},
            r"`similarity` must be one of 'diagonal', 'unconstrained'.*'diag'",
        ),
        ({"similarity": None}, r"`similarity` must be one of .*similarity=None"),
        (
            {"predictor": "mlp"},
            r"`predictor` must be None, one of 'sphere', 'full_sphere', 'cnn'.*'mlp'",
        ),
        ({"predictor": 3}, r"`predictor` must be None, one of .*predictor=3"),
        (
            {"groups": 2, "predictor": "sphere"},
            r"`groups` must be 1 with a predictor.*groups=2, predictor='sphere'",
        ),
        (
            {"similarity_regularizer": "l1", "predictor": "sphere"},
            r"`similarity_regularizer` and .* must be None with a predictor.*L1",
        ),
        (
            {"similarity_constraint": "non_neg", "predictor": "sphere"},
            r"`similarity_constraint` .* must be None with a predictor.*NonNeg",
        ),
    ],
    ids=lambda value: name_of(value) if isinstance(value, dict) else "",
)
def test_errors_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        NeuralSimilarityConv2D(**{"filters": 6, "kernel_size": 3, **options})


@pytest.mark.parametrize(
    ("options", "input_shape", "message"),
    [
        ({}, (None, 9, 8, None), r"channel axis .* must be known.*\(None, 9, 8, None\)"),
        (
            {"data_format": "channels_first"},
            (None, None, 9, 8),
            r"channel axis .* must be known.*\(None, None, 9, 8\)",
        ),
        ({"groups": 3}, (None, 9, 8, 4), r"divisible by `groups`.*8, 4\), groups=3"),
        (
            {"kernel_size": (4, 3)},
            (None, 3, 3, 4),
            r"`kernel_size` .* must not exceed the spatial size.*kernel_size=\(4, 3\)",
        ),
        (
            {"dilation_rate": 4},
            (None, 9, 8, 4),
            r"must not exceed the spatial size.*dilation_rate=\(4, 4\)",
        ),
        (
            {"kernel_size": 4, "predictor": "sphere"},
            (None, 3, 3, 4),
            r"must not exceed the spatial size.*input_shape=\(None, 3, 3, 4\)",
        ),
    ],
    ids=lambda value: name_of(value) if isinstance(value, dict) else "",
)
def test_errors_at_build(options, input_shape, message):
    layer = NeuralSimilarityConv2D(**{"filters": 6, "kernel_size": 3, **options})
    with pytest.raises(ValueError, match=message):
        layer.build(input_shape)


def test_kernel_above_the_image_is_fine_with_same_padding():
    layer = NeuralSimilarityConv2D(6, 5, padding="same")
    assert tuple(layer(ops.ones((1, 2, 3, 4))).shape) == (1, 2, 3, 6)


@pytest.mark.parametrize("predictor", [None, "sphere"])
@pytest.mark.parametrize("shape", [(9, 8, 4), (2, 3, 9, 8, 4)])
def test_error_of_a_wrong_rank(shape, predictor):
    layer = NeuralSimilarityConv2D(6, 3, predictor=predictor)
    with pytest.raises(ValueError, match=rf"expected ndim=4, found ndim={len(shape)}"):
        layer(ops.ones(shape))


@pytest.mark.parametrize("shape", [(None, 9, 8), (None, 3, 9, 8, 4)])
def test_error_of_a_wrong_rank_at_build(shape):
    layer = NeuralSimilarityConv2D(6, 3)
    with pytest.raises(ValueError, match=r"input_shape|ndim|rank"):
        layer.build(shape)


@pytest.mark.parametrize("predictor", [None, "sphere"])
@pytest.mark.parametrize(
    ("data_format", "axis"), [("channels_last", -1), ("channels_first", 1)]
)
def test_error_of_another_number_of_channels(data_format, axis, predictor):
    layer = NeuralSimilarityConv2D(6, 3, data_format=data_format, predictor=predictor)
    images = make_images(data_format)
    layer(images)
    with pytest.raises(
        ValueError, match=rf"expected axis {axis} of input shape .* value 4"
    ):
        layer(ops.concatenate([images, images], axis=axis))


@pytest.mark.parametrize("predictor", [None, "sphere"])
def test_error_of_a_smaller_image_after_build(predictor):
    layer = NeuralSimilarityConv2D(4, 5, predictor=predictor)
    layer(make_images())
    with pytest.raises(ValueError, match=r"exceed the spatial size|empty output"):
        layer(make_images()[:, :4])


@pytest.mark.parametrize(
    ("predictor", "received"),
    [
        (lambda: keras.layers.Conv2D(8, 3), r"\(2, 7, 9, 8\)"),
        (lambda: keras.layers.Conv2D(81, 3), r"\(2, 7, 9, 81\)"),
        (lambda: keras.layers.Conv2D(9, 3, padding="same"), r"\(2, 9, 11, 9\)"),
        (lambda: keras.layers.Flatten(), r"\(2, 396\)"),
    ],
    ids=["too_few", "too_many", "other_positions", "other_rank"],
)
def test_error_of_a_predictor_with_another_output_shape(predictor, received):
    layer = NeuralSimilarityConv2D(6, 3, predictor=predictor())
    expected = r"`predictor` must map .* of shape \(2, 7, 9, 9\)"
    with pytest.raises(ValueError, match=rf"{expected}.*Received: .* {received}"):
        layer(make_images())


@pytest.mark.parametrize("what", ["fold", "equivalent_kernel"])
def test_errors_of_folding(what):
    def use(layer):
        attribute = getattr(layer, what)
        return attribute() if callable(attribute) else attribute

    with pytest.raises(ValueError, match=rf"`{what}` needs a built layer.*'early'"):
        use(NeuralSimilarityConv2D(6, 3, name="early"))
    dynamic = NeuralSimilarityConv2D(6, 3, predictor="sphere", name="moving")
    dynamic.build(IMAGES.shape)
    with pytest.raises(ValueError, match=rf"`{what}` needs a static similarity.*'moving'"):
        use(dynamic)


def test_error_of_a_similarity_initializer_with_a_predictor():
    with pytest.raises(ValueError, match="similarity_initializer"):
        NeuralSimilarityConv2D(
            6, 3, predictor="sphere", similarity_initializer="glorot_uniform"
        )


# What the similarity starts from, and what holds it.


@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
def test_similarity_initializer_is_the_matrix(similarity):
    matrix = RNG.normal(size=(6, 6)).astype("float32")
    layer = NeuralSimilarityConv2D(
        6,
        (2, 3),
        similarity=similarity,
        similarity_initializer=keras.initializers.Constant(matrix),
    )
    layer.build(IMAGES.shape)
    expected = np.diag(matrix) if similarity == "diagonal" else matrix
    np.testing.assert_array_equal(
        ops.convert_to_numpy(layer.similarity_parameters), expected
    )


def test_similarity_initializer_by_name_and_as_a_function():
    layer = NeuralSimilarityConv2D(
        6, 3, similarity="unconstrained", similarity_initializer="orthogonal"
    )
    layer.build(IMAGES.shape)
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
    layer.build(IMAGES.shape)
    np.testing.assert_array_equal(
        ops.convert_to_numpy(layer.similarity_parameters), np.eye(3).reshape(-1)
    )


@pytest.mark.parametrize("similarity", ["diagonal", "unconstrained"])
def test_similarity_regularizer_adds_a_loss(similarity):
    layer = NeuralSimilarityConv2D(
        6, 3, similarity=similarity, similarity_regularizer=keras.regularizers.L1(0.3)
    )
    layer.build(IMAGES.shape)
    randomize(layer)
    parameters = ops.convert_to_numpy(layer.similarity_parameters)
    (loss,) = layer.losses
    assert_close(loss, 0.3 * np.abs(parameters).sum(), 1e-5)


def test_kernel_regularizer_of_a_dynamic_layer_counts_the_predictor():
    layer = NeuralSimilarityConv2D(6, 3, predictor="sphere", kernel_regularizer="l2")
    layer.build(IMAGES.shape)
    assert len(layer.losses) == 3


def test_similarity_constraint_holds_in_fit():
    layer = NeuralSimilarityConv2D(
        6,
        3,
        similarity="unconstrained",
        similarity_initializer="random_normal",
        similarity_constraint="non_neg",
    )
    layer.build(IMAGES.shape)
    assert np.min(ops.convert_to_numpy(layer.similarity_parameters)) < 0
    model = keras.Sequential([layer])
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    images = ops.convert_to_numpy(make_images())
    model.fit(images, np.ones((2, 7, 9, 6)), verbose=0)
    parameters = ops.convert_to_numpy(layer.similarity_parameters)
    assert np.min(parameters) == 0
    assert np.max(parameters) > 0


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
    parameters = np.asarray(parameters, "float64")
    return parameters[..., :1, None] * np.eye(6) + parameters[..., 1:, None] / 6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("predictor", [None, "cnn"])
def test_own_similarity(predictor, dtype):
    options = {"kernel_size": (2, 3), "padding": "same"}
    layer = NeuralSimilarityConv2D(
        6, similarity=Blend(6), predictor=predictor, dtype=dtype, **options
    )
    config = keras.saving.serialize_keras_object(layer)
    layer = keras.saving.deserialize_keras_object(config)
    assert layer.similarity.taps == 6
    images = make_images(dtype=dtype)
    layer.build(images.shape)
    randomize(layer)
    if predictor is None:
        matrix = blend(ops.convert_to_numpy(layer.similarity_parameters))
        assert_close(layer.fold()(images), layer(images), TOLERANCES[dtype])
    else:
        matrix = np.eye(6) + blend(ops.convert_to_numpy(layer.predictor(images)))
    expected = expected_outputs(layer, matrix, options)
    assert_close(layer(images), expected, TOLERANCES[dtype])


def test_own_similarity_starts_as_the_plain_convolution():
    layer = NeuralSimilarityConv2D(6, (2, 3), similarity=Blend(6))
    layer.build(IMAGES.shape)
    np.testing.assert_array_equal(
        ops.convert_to_numpy(layer.similarity_parameters), [1.0, 0.0]
    )


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
        layer(make_images())
