"""Multiply-adds, counted by hand."""

import keras
import pytest

from experiments.common.multiply_adds import multiply_adds
from nsl_keras import layers, predictors
from nsl_keras.convert import add_similarity, fold
from nsl_keras.similarities import Unconstrained

# 9 taps, 4 channels, 6 filters, 64 positions of an 8x8 image.
PLAIN = 64 * 9 * 4 * 6
SPHERE = 9 * 4 * 5 + 9 * 5 * 9  # A predictor of width 5, at one position.
NARROW = {"predictor": predictors.SimilarityPredictor(width=5)}


def convolution(**options):
    return layers.NeuralSimilarityConv2D(6, 3, **{"padding": "same", **options})


def recipe(**options):
    return predictors.SimilarityPredictor(width=5, **options)


def dense(**options):
    return layers.NeuralSimilarityDense(6, **UNS, block_size=4, **options)


IMAGE, UNS = (8, 8, 4), {"similarity": "unconstrained"}
PREDICTED = 64 * (SPHERE + 9 * 4)
OF_81 = 9 * 4 * 5 + 9 * 5 * 81  # A predictor of an unconstrained `M`, at one position.
POOLED = 16 * OF_81 + 64 * 81 * 4  # Predicted for blocks of 2x2 positions.
BLOCKS = 16 * SPHERE + 56 * 9 * 4
SHARED = predictors.SharedSimilarityPredictor(recipe(), 4)
DEPTHWISE = layers.NeuralSimilarityDepthwiseConv2D(3, padding="same", **NARROW)
TRANSPOSED = layers.NeuralSimilarityConv2DTranspose(6, 3, 2, **UNS)
#: It knows no sizes of its own.
NESTED = keras.Sequential([keras.Input((None, None, 4)), convolution()])


@pytest.mark.parametrize(
    ("layer", "shape", "plain", "added"),
    [
        (convolution(), IMAGE, PLAIN, 0),
        (convolution(strides=2, **UNS), IMAGE, PLAIN // 4, 0),
        (convolution(groups=2), IMAGE, PLAIN // 2, 0),
        (convolution(**NARROW), IMAGE, PLAIN, PREDICTED),
        (convolution(**UNS, predictor=recipe(pooled=True)), IMAGE, PLAIN, POOLED),
        (convolution(predictor=recipe(downsampling=2)), (7, 8, 4), 7 * PLAIN // 8, BLOCKS),
        (convolution(predictor=SHARED), IMAGE, PLAIN, PREDICTED + 64 * 9 * 4 * 4),
        (DEPTHWISE, IMAGE, 64 * 9 * 4, 64 * (4 * 5 + 9 * 5 * 9 + 9 * 4)),
        (TRANSPOSED, IMAGE, PLAIN, 0),
        (dense(), (5, 12), 5 * 12 * 6, 0),
        (dense(**NARROW), (5, 12), 5 * 12 * 6, 5 * (12 * 5 + 5 * 16 + 3 * 16)),
        (NESTED, IMAGE, PLAIN, 0),
        (layers.InstanceFiLM(10), IMAGE, 3 * 10 * 4, 0),
    ],
)
def test_one_layer(layer, shape, plain, added):
    model = keras.Sequential([keras.Input(shape), layer])
    assert multiply_adds(model) == (plain + added, plain)
    inputs = keras.Input(shape)
    functional = keras.Model(inputs, keras.models.clone_model(model)(inputs))
    assert multiply_adds(functional) == (plain + added, plain)


@pytest.mark.long
def test_resnet50_on_its_usual_images():
    # The figure for this network everywhere: 3.86 G.
    found = multiply_adds(keras.applications.ResNet50(weights=None))
    assert found == (3_857_973_248, 3_857_973_248)


def test_static_similarities_cost_what_the_plain_network_does():
    plain = keras.Sequential(
        [
            keras.Input((9, 9, 3)),
            keras.layers.Conv2D(4, 3, activation=keras.layers.PReLU()),
            keras.layers.BatchNormalization(),
            keras.layers.Conv2DTranspose(3, 2),
            keras.layers.SeparableConv2D(2, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(5),
        ]
    )
    expected = multiply_adds(plain)
    assert expected[0] == expected[1] > 0
    assert multiply_adds(add_similarity(plain, Unconstrained(learn_shape=True))) == expected
    assert multiply_adds(fold(add_similarity(plain))) == expected


def test_unknown_sizes_and_layers_that_are_called_twice_are_refused():
    inputs = keras.Input((None, None, 4))
    with pytest.raises(ValueError, match="known sizes"):
        multiply_adds(keras.Model(inputs, convolution()(inputs)))
    layer, inputs = keras.layers.Conv2D(4, 3), keras.Input((8, 8, 4))
    with pytest.raises(ValueError, match=r"must call .* once"):
        multiply_adds(keras.Model(inputs, layer(layer(inputs))))
