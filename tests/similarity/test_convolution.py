"""Convolutions with a neural similarity, against Keras's own and against the formula."""

import functools

import keras
import numpy as np
import pytest
from finite_differences import check_gradients
from golden_files import DTYPES
from helpers import as_numpy, normal, refusing
from similarity_layers import (
    FAMILY,
    FILTERS,
    LAYERS_AND_SIMILARITIES,
    SIMILARITIES,
    TOLERANCES,
    assert_close,
    assert_equal,
    identity_parameters,
    predicted_matrix,
    randomize,
    static_matrix,
)

from nsl_keras import layers
from nsl_keras.layers import NeuralSimilarityConv1D, NeuralSimilarityConv2D
from nsl_keras.predictors import SharedSimilarityPredictor, SimilarityPredictor
from nsl_keras.similarities import Diagonal, Unconstrained

each_layer = pytest.mark.parametrize("name", FAMILY)
one_layer_of_a_kind = pytest.mark.parametrize("name", ["conv2d", "depthwise_conv2d"])

# An odd padding, a stride, a dilation, and the axes not alike.
SOME_GEOMETRIES = [
    {"kernel_size": (2, 3, 2), "padding": "same", "strides": 2},
    {"kernel_size": (3, 2, 1), "dilation_rate": (1, 3, 2)},
]


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
    inputs = normal(*shape)
    with_bias, bias = as_numpy(layer(inputs)), as_numpy(layer.bias)
    layer.bias.assign(np.zeros(FILTERS))
    expected = as_numpy(layer(inputs)) + bias.reshape(-1, *[1] * member.rank)
    assert_close(with_bias, expected, 1e-5)


@pytest.mark.parametrize(("name", "similarity"), LAYERS_AND_SIMILARITIES)
def test_static_layer_follows_the_formula(name, similarity):
    member, dtype = FAMILY[name], DTYPES[0]
    inputs, geometries = member.tensor(dtype), SOME_GEOMETRIES
    if similarity in ("diagonal", "unconstrained"):
        geometries = member.geometries(groups=name == "conv2d")
    elif similarity == "full" and name == "conv2d":
        geometries = [*SOME_GEOMETRIES, {"kernel_size": 2, "groups": 2}]
    for geometry in geometries:
        layer = member.make_built(
            similarity=SIMILARITIES[similarity], dtype=dtype, **geometry
        )
        expected = member.expected(layer, static_matrix(layer))
        assert_close(layer(inputs), expected, TOLERANCES[dtype], geometry)


def make_predictor(kind, member, similarity, dtype, geometry):
    """A predictor of a kind with a narrow hidden layer."""
    recipe = functools.partial(SimilarityPredictor, width=5, downsampling=1)
    if kind in ("sphere", "full_sphere", "cnn"):
        return recipe(kind)
    if kind == "pooled":
        return recipe(pooled=True)
    if kind == "in_blocks":
        return recipe(downsampling=2)
    if kind.startswith("shared"):
        return SharedSimilarityPredictor(
            recipe(pooled=kind == "shared_pooled"), adapted_filters=3
        )
    geometry = member.options(**geometry)
    del geometry["depth_multiplier" if member.depthwise else "filters"]
    outputs = identity_parameters(similarity, int(np.prod(geometry["kernel_size"]))).size
    if kind == "own":
        plain = keras.layers.Conv3D if member.rank == 3 else keras.layers.Conv2D
        return plain(outputs, activation="tanh", dtype=dtype, **geometry)
    assert kind == "own_per_example"
    dense = keras.layers.Dense(outputs, "tanh", dtype=dtype)
    return keras.Sequential([keras.layers.Flatten(dtype=dtype), dense])


@pytest.mark.parametrize(
    ("name", "similarity", "kind"),
    [
        ("conv2d", "diagonal", "sphere"),
        ("conv2d", "unconstrained", "full_sphere"),
        ("conv2d", "symmetric", "cnn"),
        ("conv2d", "positive_semidefinite", "pooled"),
        ("conv2d", "diagonal", "shared"),
        ("conv2d", "unconstrained", "own_per_example"),
        ("conv1d", "positive_semidefinite", "sphere"),
        ("conv1d", "diagonal", "shared_pooled"),
        ("conv1d", "unconstrained", "full_sphere"),
        ("conv3d", "symmetric", "sphere"),
        ("conv3d", "diagonal", "own"),
        ("depthwise_conv2d", "unconstrained", "sphere"),
        ("depthwise_conv2d", "symmetric", "shared"),
    ],
)
def test_dynamic_layer_follows_the_formula(name, similarity, kind):
    member, dtype = FAMILY[name], DTYPES[0]
    inputs, similarity = member.tensor(dtype), SIMILARITIES[similarity]
    geometries = SOME_GEOMETRIES
    if kind == "sphere":
        geometries = member.geometries(dynamic=True)
    for geometry in geometries:
        predictor = make_predictor(kind, member, similarity, dtype, geometry)
        layer = member.make_built(
            similarity=similarity, predictor=predictor, dtype=dtype, **geometry
        )
        expected = member.expected(layer, predicted_matrix(layer, inputs))
        assert_close(layer(inputs), expected, TOLERANCES[dtype], geometry)


@pytest.mark.parametrize("kind", ["sphere", "full_sphere", "shared", "in_blocks"])
def test_causal_layer_never_looks_ahead(kind):
    member, similarity = FAMILY["conv1d"], SIMILARITIES["unconstrained"]
    dilated = [] if kind == "in_blocks" else [{"dilation_rate": 2}]
    for options in ({}, {"strides": 2}, *dilated):
        geometry = {"kernel_size": 3, "padding": "causal", **options}
        predictor = make_predictor(kind, member, similarity, "float32", geometry)
        layer = member.make_built(similarity=similarity, predictor=predictor, **geometry)
        inputs = as_numpy(member.tensor())
        changed = inputs + 1.0 * (np.arange(inputs.shape[1]) == 6)[:, None]
        before, after = as_numpy(layer(inputs)), as_numpy(layer(changed.astype("float32")))
        # Position p stands at step p * strides.
        earlier = 6 // options.get("strides", 1)
        assert_close(after[:, :earlier], before[:, :earlier], 1e-6, geometry)
        assert np.max(np.abs(after - before)[:, earlier:]) > 0.01


def test_errors_of_predictors_that_look_ahead_or_do_not_fit():
    def build(predictor, size=3, padding="causal"):
        layer = NeuralSimilarityConv1D(6, size, padding=padding, predictor=predictor)
        layer.build((None, 11, 4))

    with pytest.raises(ValueError, match=r"must be not pooled in a causal layer"):
        build(SharedSimilarityPredictor(SimilarityPredictor(pooled=True)))
    shared = SharedSimilarityPredictor()
    build(shared, padding="same")
    with pytest.raises(ValueError, match=r"all causal or none.*'causal'"):
        build(shared)
    with pytest.raises(ValueError, match=r"with the same kernel size.*kernel_size=\(4"):
        build(shared, 4, "same")


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
    # at any step; but a sparse matrix jumps, and a rotation is no polynomial.
    curved = similarity.startswith("sparse") or similarity == "orthogonal"
    skip = ["similarity"] if curved else []
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
        assert layer.bilinear_form.network.non_trainable_variables
    check_gradients(layer, member.tensor("float64"), "float64", 1e-6, 1e-5, training)


@pytest.mark.parametrize("dtype", [DTYPES[0], "mixed_bfloat16"])
@each_layer
def test_fold_computes_the_same(name, dtype):
    member, inputs = FAMILY[name], FAMILY[name].tensor()
    for geometry in [
        *SOME_GEOMETRIES,
        *([{"kernel_size": 2, "groups": 2}] if name == "conv2d" else []),
        *([{"kernel_size": 4, "padding": "causal"}] if member.rank == 1 else []),
    ]:
        similarity = Unconstrained(learn_shape="strides" in geometry)
        layer = member.make_built(
            similarity=similarity, dtype=dtype, activation="tanh", **geometry
        )
        if similarity.learn_shape:
            layer.bilinear_form.shape_parameters.assign(
                np.linspace(0.8, 0.3, layer.bilinear_form.taps)
            )
        outputs = layer(inputs)
        plain = layer.fold()
        assert type(plain) is member.plain
        assert_equal(layer(inputs), outputs)
        # Far below the rounding of bfloat16: the equivalent kernel is rounded once, as
        # the plain layer rounds its own.
        tolerance = 1e-12 if dtype == "float64" else 1e-6
        assert_close(plain(inputs), outputs, tolerance, geometry)


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
@pytest.mark.parametrize("predictor", [None, "cnn"])
def test_a_separable_layer_is_the_depthwise_one_and_a_1x1_convolution(
    predictor, data_format
):
    member = FAMILY["depthwise_conv2d"]
    options = {"kernel_size": (2, 3), "depth_multiplier": 3, "data_format": data_format}
    options |= {"similarity": "unconstrained", "predictor": predictor, "padding": "same"}
    inputs = member.tensor(data_format=data_format)
    separable = layers.NeuralSimilaritySeparableConv2D(5, **options)
    separable.build(inputs.shape)
    randomize(separable)
    depthwise = layers.NeuralSimilarityDepthwiseConv2D(use_bias=False, **options)
    depthwise.build(inputs.shape)
    depthwise.set_weights(
        [separable.kernel, *(each.value for each in separable.bilinear_form.weights)]
    )
    pointwise = keras.layers.Conv2D(5, 1, data_format=data_format)
    between = depthwise(inputs)
    pointwise.build(between.shape)
    pointwise.set_weights([separable.pointwise_kernel, separable.bias])
    assert_close(separable(inputs), pointwise(between), 1e-5)
    if predictor is None:
        assert_close(separable.fold()(inputs), separable(inputs), 1e-5)
    separable.kernel_trainable = False
    assert separable.trainable_variables == separable.bilinear_form.trainable_variables


def at_each_position(predictor, context):
    return [keras.layers.Conv2D(context.outputs, 1)]


DYNAMIC, BLOCKS = {"predictor": "sphere"}, SimilarityPredictor(downsampling=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 2, **DYNAMIC}, "`groups` must be 1 with a predictor.*groups=2"),
        (
            {"predictor": "other"},
            "must be one of 'sphere', 'full_sphere', 'cnn', a `Sim.*'other'",
        ),
        ({"predictor": np.ones(3)}, "`predictor` must be one of .*predictor=array"),
        *(
            (
                {"similarity": similarity, **DYNAMIC},
                rf"`similarity` must be with a predictor neither .*{name}",
            )
            for similarity, name in (
                (Diagonal(constraint="non_neg"), "Diagonal .*NonNeg"),
                (Diagonal(initializer="glorot_uniform"), "Diagonal .*Glorot"),
                (Diagonal(shared_by="filter"), "Diagonal .*'filter'"),
                ("sparse", "Sparse with"),
            )
        ),
        (
            {"predictor": keras.layers.Conv2D(81, 3)},
            r"`predictor` must return the 9 parameters .*\(2, 7, 9, 81\)",
        ),
        (
            {"predictor": BLOCKS, "dilation_rate": 2},
            r"without `downsampling`, except in convolutions without dilation",
        ),
        (
            {"predictor": SimilarityPredictor(at_each_position, downsampling=2)},
            r"`predictions` must be one for each block of `downsampling`: 4 along 7.*=9",
        ),
    ],
)
def test_errors(options, message):
    member = FAMILY["conv2d"]
    with pytest.raises(ValueError, match=message):
        member.make(**{"kernel_size": 3, **options})(member.tensor())


def layer_on(inputs, **options):
    return NeuralSimilarityConv2D(4, 3, **options)(inputs)


test_errors_of_layers_and_inputs = refusing(
    (lambda: FAMILY["depthwise_conv2d"].make_built(similarity="full"), "shared .*'Full'"),
    (lambda: layer_on(np.ones((1, 6, 7, 2), "uint8")), "`inputs` must be floats.*uint8"),
    (lambda: layer_on(np.ones((2, 2, 7, 3))), "zero or negative"),
    (lambda: layer_on(np.ones((2, 2, 7, 3)), predictor="sphere"), "zero or negative"),
)
