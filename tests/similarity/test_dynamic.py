"""Layers with a predicted similarity, against the formula."""

import keras
import numpy as np
import pytest
from helpers import (
    DTYPES,
    IS_TENSORFLOW,
    as_numpy,
    assert_close,
    assert_equal,
    keras_3_15,
    normal,
    randomize,
    refusing,
    run_litert,
)
from layer_cases import SIMILARITIES, TOLERANCES, built, by_formula, predicted_matrix

from nsl_keras import layers
from nsl_keras.layers import NeuralSimilarityConv1D, NeuralSimilarityConv2D
from nsl_keras.predictors import SharedSimilarityPredictor, SimilarityPredictor
from nsl_keras.similarities import Diagonal

DTYPE = DTYPES[0]
# An odd padding, a stride, a dilation, and the axes not alike.
SOME_GEOMETRIES = [
    {"kernel_size": (2, 3, 2), "padding": "same", "strides": 2},
    {"kernel_size": (3, 2, 1), "dilation_rate": (1, 3, 2)},
]
ALL_GEOMETRIES = [
    *SOME_GEOMETRIES,
    {"kernel_size": 1, "padding": "same", "strides": 2},
    {"kernel_size": (2, 3, 2), "padding": "same", "dilation_rate": (3, 1, 2)},
    {"kernel_size": (12, 1, 1), "padding": "same", "strides": 2},  # Above the image.
]
CAUSAL = [
    {"kernel_size": 4, "padding": "causal", "dilation_rate": 2},
    {"kernel_size": 4, "padding": "causal", "strides": 2},
]


def recipe(kind="sphere", **options):
    return SimilarityPredictor(kind, **{"width": 5, "downsampling": 1, **options})


PREDICTORS = {
    "sphere": recipe,
    "full_sphere": lambda: recipe("full_sphere"),
    "pooled": lambda: recipe(pooled=True),
    "in_blocks": lambda: recipe(downsampling=2),
    "shared": lambda: SharedSimilarityPredictor(recipe(), adapted_filters=3),
    "shared_pooled": lambda: SharedSimilarityPredictor(recipe(pooled=True), 3),
    # Layers of Keras, for 2x3 taps.
    "own": lambda: keras.Sequential(
        [
            keras.layers.GlobalAveragePooling2D(dtype=DTYPE),
            keras.layers.Dense(36, "tanh", dtype=DTYPE),
        ]
    ),
}


@pytest.mark.parametrize(
    ("name", "similarity", "kind"),
    [
        ("conv2d", "diagonal", "sphere"),
        ("conv2d", "unconstrained", "full_sphere"),
        ("conv2d", "positive_semidefinite", "pooled"),
        ("conv2d", "unconstrained", "own"),
        ("conv1d", "positive_semidefinite", "sphere"),
        ("conv1d", "diagonal", "shared_pooled"),
        ("conv3d", "symmetric", "sphere"),
        ("depthwise", "unconstrained", "sphere"),
        ("depthwise", "symmetric", "shared"),
    ],
)
def test_convolutions_follow_the_formula(name, similarity, kind):
    is_first = (name, kind) == ("conv2d", "sphere")
    geometries = ALL_GEOMETRIES if is_first else SOME_GEOMETRIES
    if name == "conv1d" and "pooled" not in kind:
        geometries = [*geometries, *CAUSAL]
    for geometry in geometries:
        options = {"similarity": SIMILARITIES[similarity], "predictor": PREDICTORS[kind]()}
        layer, inputs = built(name, dtype=DTYPE, **options, **geometry)
        expected = by_formula(layer, inputs, predicted_matrix(layer, inputs))
        assert_close(layer(inputs), expected, TOLERANCES[DTYPE], geometry)


@pytest.mark.parametrize("block_size", [None, 4])
def test_dense_layers_follow_the_formula(block_size):
    for name, similarity in SIMILARITIES.items():
        if similarity.static_only:
            continue
        options = {"similarity": similarity, "predictor": "cnn", "block_size": block_size}
        layer, inputs = built("dense", dtype=DTYPE, **options)
        expected = by_formula(layer, inputs, predicted_matrix(layer, inputs))
        assert_close(layer(inputs), expected, 10 * TOLERANCES[DTYPE], name)
        assert_close(layer(inputs[:, 0]), expected[:, 0], 10 * TOLERANCES[DTYPE], name)


@pytest.mark.jax
def test_an_empty_batch():
    layer = layers.NeuralSimilarityDense(3, predictor="sphere")
    assert tuple(layer(np.zeros((0, 6), "float32")).shape) == (0, 3)


@pytest.mark.parametrize(
    "predictor",
    ["sphere", keras.layers.Dense(12, kernel_initializer="zeros")],
    ids=["sphere", "custom"],
)
def test_masked_vectors_change_no_statistics(predictor):
    layer = layers.NeuralSimilarityDense(5, predictor=predictor)
    model = keras.Sequential([keras.Input((None, 12)), keras.layers.Masking(), layer])
    randomize(layer)
    weights, vectors, found = model.get_weights(), normal(2, 3, 12), []
    for padding in (0, 20):
        model.set_weights(weights)
        given = np.pad(vectors, [(0, 0), (0, padding), (0, 0)])
        outputs = as_numpy(model(given, training=True))
        found.append([outputs[:, :3], *model.get_weights()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_convolutions_take_integers():
    images = np.arange(168, dtype="uint8").reshape(2, 6, 7, 2)
    layer = NeuralSimilarityConv2D(4, 3, predictor="sphere")
    assert_equal(layer(images), layer(images.astype("float32")))


@keras_3_15
@pytest.mark.skipif(not IS_TENSORFLOW, reason="LiteRT's converter is TensorFlow's")
def test_unknown_sizes_run_in_litert(tmp_path):
    import tensorflow as tf

    layer = NeuralSimilarityConv2D(2, 3, padding="same", predictor="cnn")
    model = keras.Sequential([keras.Input((None, None, 3)), layer])
    randomize(model)
    model.export(tmp_path / "model.tflite", format="litert", verbose=False)
    images = normal(2, 4, 3, 3)
    assert_close(run_litert(tmp_path / "model.tflite", images), model(images), 1e-4)
    unknown = [tf.TensorSpec((None, None, None, 3))]
    found = tf.function(layer.predicted_matrices, unknown)(images)
    assert_close(found, layer.predicted_matrices(images))


@pytest.mark.parametrize("kind", ["full_sphere", "shared", "in_blocks"])
def test_causal_layer_never_looks_ahead(kind):
    dilated = [] if kind == "in_blocks" else [{"dilation_rate": 2}]
    for options in ({}, {"strides": 2}, *dilated):
        options = {"similarity": "unconstrained", "padding": "causal", **options}
        layer, inputs = built("conv1d", predictor=PREDICTORS[kind](), **options)
        changed = inputs + 1.0 * (np.arange(inputs.shape[1]) == 6)[:, None]
        before, after = as_numpy(layer(inputs)), as_numpy(layer(changed))
        # Position p stands at step p * strides.
        earlier = 6 // options.get("strides", 1)
        assert_close(after[:, :earlier], before[:, :earlier], 1e-6, options)
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


def test_a_separable_layer_is_the_depthwise_one_and_a_1x1_convolution():
    options = {"similarity": "unconstrained", "predictor": "cnn", "padding": "same"}
    separable, inputs = built("separable", **options)
    depthwise, _ = built("depthwise", use_bias=False, **options)
    depthwise.set_weights(
        [separable.kernel, *(each.value for each in separable.bilinear_form.weights)]
    )
    pointwise = keras.layers.Conv2D(12, 1)
    between = depthwise(inputs)
    pointwise.build(between.shape)
    pointwise.set_weights([separable.pointwise_kernel, separable.bias])
    assert_close(separable(inputs), pointwise(between), 1e-5)
    separable.kernel_trainable = False
    assert separable.trainable_variables == separable.bilinear_form.trainable_variables


def at_each_position(predictor, context):
    return [keras.layers.Conv2D(context.outputs, 1)]


DYNAMIC = {"predictor": "sphere"}
STATIC = [Diagonal(initializer="glorot_uniform"), Diagonal(shared_by="filter"), "sparse"]
CANNOT = r"`similarity` must be one that can be predicted.*='(Diagonal|Sparse)'"
ONE_TAP = {"similarity": "orthogonal", "kernel_size": 1, **DYNAMIC}
IN_BLOCKS = SimilarityPredictor(at_each_position, downsampling=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 2, **DYNAMIC}, "`predictor` must be None in .* with `groups`"),
        (ONE_TAP, "`similarity` must be one with parameters to predict.*='Orthogonal'"),
        ({"predictor": "other"}, "must be one of 'sphere', 'full_.*, a `Sim.*'other'"),
        *(({"similarity": each, **DYNAMIC}, CANNOT) for each in STATIC),
        ({"predictor": keras.layers.Conv2D(81, 3)}, r"`predictor.output_s.* 9, .* 81\)"),
        ({"predictor": IN_BLOCKS}, r"`predictions` must .* block .* of \(7, 9\).*=\(9, 11"),
        (
            {"predictor": keras.layers.Conv2D(9, (3, 11))},
            r"`predictions` must be at each position.* of \(7, 9\).*=\(7, 1\)",
        ),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        NeuralSimilarityConv2D(4, **{"kernel_size": 3, **options})(normal(2, 9, 11, 4))


def on_small_images(layer):
    layer.build((None, 9, 9, 3))
    layer(np.ones((2, 2, 7, 3)))


test_errors_of_layers_and_inputs = refusing(
    (
        lambda: layers.NeuralSimilarityConv2DTranspose(2, 3, **DYNAMIC),
        "`predictor` must be None in .* transposed layers",
    ),
    (lambda: on_small_images(NeuralSimilarityConv2D(4, 3)), "zero or neg"),
    (lambda: on_small_images(NeuralSimilarityConv2D(4, 3, **DYNAMIC)), "zero or neg"),
    (lambda: on_small_images(layers.SphereConv2D(4, 3)), "zero or negative"),
    (lambda: layers.SphereConv2D(4, 3).build((None, 5, 5, None)), "known at the channel"),
    (
        lambda: layers.NeuralSimilarityDense(5, block_size=5).build((None, 12)),
        "`block_size` must be a divisor of the 12 feat.*=5",
    ),
)
