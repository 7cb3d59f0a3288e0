"""`from_classifier`: trained classifiers of Keras as Meta-Neighborhoods models."""

import keras
import numpy as np
import pytest
from helpers import as_numpy, assert_close, normal, refusing, stacked
from keras import layers, ops

import nsl_keras
from nsl_keras.layers import CosineDense, NeighborDictionary

IMAGES = normal(6, 8, 8, 3)


def stem():
    return [
        layers.Conv2D(4, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.GlobalAveragePooling2D(),
        layers.Dropout(0.5),
    ]


def sequential(*end):
    return stacked((8, 8, 3), *stem(), *end)


def functional(*end):
    model = sequential(*end)
    return keras.Model(model.inputs[0], model.outputs[0])


def nested(*end):
    """As an application after its preprocessing."""
    return stacked((8, 8, 3), layers.Rescaling(2.0), functional(*end))


def randomized(model):
    rng = np.random.default_rng(1)
    model.set_weights([np.abs(rng.normal(size=w.shape)) + 0.1 for w in model.weights])
    return model


def from_classifier(model, dictionary=10, **options):
    return nsl_keras.MetaNeighborhoodModel.from_classifier(model, dictionary, **options)


def not_registered(shape, dtype=None):
    return ops.ones(shape, dtype)


ENDS = {
    "logits": lambda: [layers.Dense(3, kernel_initializer=not_registered)],
    "softmax": lambda: [layers.Dense(3, activation="softmax")],
    "layer": lambda: [layers.Dense(3, use_bias=False), layers.Softmax()],
    "cosine": lambda: [CosineDense(3), layers.Activation("softmax")],
    "convolution": lambda: [
        layers.Reshape((1, 1, 4)),
        layers.Conv2D(3, 1),
        layers.Reshape((3,)),
        layers.Activation("softmax"),
    ],
}


@pytest.mark.parametrize(
    ("make", "end"),
    [
        (nested, "logits"),
        (nested, "softmax"),
        (functional, "layer"),
        (sequential, "layer"),
        (nested, "cosine"),
        (sequential, "convolution"),
    ],
)
def test_predicts_what_the_source_predicts(make, end):
    source = randomized(make(*ENDS[end]()))
    weights, expected = source.get_weights(), as_numpy(source(IMAGES))
    names = [layer.name for layer in source.layers]
    model = from_classifier(source, inner_learning_rate=1e-9)
    for adapt in (False, True):
        logits = model(IMAGES, adapt=adapt)
        assert_close(logits if end == "logits" else ops.softmax(logits), expected)
    head = model.head
    assert type(head) is (CosineDense if end == "cosine" else layers.Dense)
    assert model.neighborhood.active_inner_loop == "dual"
    assert np.ptp(as_numpy(model(IMAGES))) > 1e-3
    # The source is as it was, whatever becomes of the new model.
    model.set_weights([weight + 1 for weight in model.get_weights()])
    assert [layer.name for layer in source.layers] == names
    np.testing.assert_equal(source.get_weights(), weights)


def test_options_and_frozen_backbones():
    source, dictionary = sequential(layers.Dense(3, "softmax")), NeighborDictionary(7)
    source.layers[0].trainable = False
    model = from_classifier(source, dictionary, inner_steps=2)
    assert model.dictionary is dictionary
    assert model.neighborhood.inner_steps == 2
    assert not model.backbone.layers[0].trainable
    assert source.layers[-1].activation is keras.activations.softmax
    source.trainable = False
    assert_close(ops.softmax(model(IMAGES, adapt=False)), source(IMAGES))
    assert from_classifier(source)(IMAGES).shape == (6, 3)


def test_a_frozen_convolution_becomes_a_frozen_head():
    source = sequential(*ENDS["convolution"]())
    last = source.layers[-3]
    last.trainable, last.kernel_regularizer = False, keras.regularizers.L2(0.1)
    last.bias_constraint = keras.constraints.NonNeg()
    head = from_classifier(source).head
    assert not head.trainable
    assert isinstance(head.bias.constraint, keras.constraints.NonNeg)
    assert float(head.kernel_regularizer.l2) == pytest.approx(0.1)


def test_a_trained_regressor():
    source = sequential(layers.Dense(1))
    model = from_classifier(source, task="regression", inner_learning_rate=1e-9)
    assert_close(model(IMAGES), source(IMAGES))


@pytest.mark.parametrize(
    "end",
    [
        lambda: [layers.Dense(1, "sigmoid", kernel_regularizer="l2", use_bias=False)],
        lambda: [
            layers.Reshape((1, 1, 4)),
            layers.Conv2D(1, 1, activation="sigmoid"),
            layers.Flatten(),
        ],
    ],
)
def test_a_sigmoid_becomes_two_logits(end):
    source = randomized(sequential(*end()))
    model = from_classifier(source, inner_learning_rate=1e-9)
    expected = as_numpy(source(IMAGES))
    logits = model(IMAGES)
    assert_close(ops.softmax(logits), np.concatenate([1 - expected, expected], 1))
    assert not np.any(model(IMAGES, adapt=False)[:, 0])


def test_one_output_in_a_structure():
    inputs = keras.Input((4,))
    outputs = {"logits": layers.Dense(3)(layers.Dense(5)(inputs))}
    model = from_classifier(keras.Model(inputs, outputs), 4)
    assert model(normal(2, 4)).shape == (2, 3)


def several_outputs():
    inputs = keras.Input((4,))
    return keras.Model(inputs, [layers.Dense(3)(inputs), layers.Dense(2)(inputs)])


def same_layer_twice():
    inputs = keras.Input((3,))
    dense = layers.Dense(3)
    return keras.Model(inputs, dense(dense(inputs)))


def constrained():
    convolution = layers.Conv2D(3, 1, kernel_constraint=keras.constraints.UnitNorm())
    return sequential(layers.Reshape((1, 1, 4)), convolution, layers.Flatten())


def of_sequences(*end):
    return from_classifier(stacked((5, 4), layers.Dense(3), *end))


test_errors = refusing(
    (
        lambda: from_classifier(sequential(layers.Dense(3, "softmax"), layers.Softmax())),
        "a softmax may follow",
    ),
    (lambda: from_classifier(keras.Model()), "`model` must be a functional or Sequential"),
    (lambda: from_classifier(keras.Sequential([layers.Dense(3)])), "and built: start it"),
    (lambda: from_classifier(several_outputs()), "must end in one Dense"),
    (lambda: from_classifier(constrained()), "without a constraint of its kernel"),
    (lambda: from_classifier(same_layer_twice()), "uses its last layer once"),
    (lambda: from_classifier(sequential(layers.Dense(1))), "at least two classes"),
    (lambda: of_sequences(), r"of shape \(batch, classes\) or \("),
    (lambda: of_sequences(layers.Flatten()), "a model of one output"),
)
