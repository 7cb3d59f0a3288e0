"""`from_classifier`: trained classifiers of Keras as Meta-Neighborhoods models."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import nsl_keras
from nsl_keras.layers import CosineDense

rng = np.random.default_rng(0)
IMAGES = rng.normal(size=(6, 8, 8, 3)).astype("float32")


def stem():
    return [
        layers.Conv2D(4, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.GlobalAveragePooling2D(),
        layers.Dropout(0.5),
    ]


def sequential(*end):
    return keras.Sequential([keras.Input((8, 8, 3)), *stem(), *end])


def functional(*end):
    inputs = keras.Input((8, 8, 3))
    hidden = inputs
    for layer in (*stem(), *end):
        hidden = layer(hidden)
    return keras.Model(inputs, hidden)


def nested(*end):
    """As an application after its preprocessing."""
    return keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Rescaling(2.0), functional(*end)]
    )


def randomized(model):
    rng = np.random.default_rng(1)
    model.set_weights([np.abs(rng.normal(size=w.shape)) + 0.1 for w in model.weights])
    return model


def from_classifier(model, **options):
    return nsl_keras.MetaNeighborhoodModel.from_classifier(model, 10, **options)


ENDS = {
    "logits": lambda: [layers.Dense(3)],
    "softmax": lambda: [layers.Dense(3, activation="softmax")],
    "activation": lambda: [layers.Dense(3), layers.Activation("softmax")],
    "layer": lambda: [layers.Dense(3, use_bias=False), layers.Softmax()],
    "cosine": lambda: [CosineDense(3), layers.Activation("softmax")],
}


@pytest.mark.parametrize(
    ("make", "end"),
    [
        (functional, "softmax"),
        (functional, "cosine"),
        (sequential, "layer"),
        (nested, "activation"),
        (nested, "logits"),
    ],
)
def test_predicts_what_the_source_predicts(make, end):
    source = randomized(make(*ENDS[end]()))
    weights = source.get_weights()
    names = [layer.name for layer in source.layers]
    expected = ops.convert_to_numpy(source(IMAGES))
    model = from_classifier(source, inner_learning_rate=1e-9)
    for adapt in (False, True):
        logits = model(IMAGES, adapt=adapt)
        found = logits if end == "logits" else ops.softmax(logits)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    head = model.head
    assert type(head) is (CosineDense if end == "cosine" else layers.Dense)
    assert model.neighborhood.active_inner_loop == "dual"
    assert np.ptp(ops.convert_to_numpy(model(IMAGES))) > 1e-3
    # The source is as it was, whatever becomes of the new model.
    model.set_weights([weight + 1 for weight in model.get_weights()])
    assert [layer.name for layer in source.layers] == names
    for new, old in zip(source.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.long
def test_an_application_in_a_line(tmp_path):
    source = keras.applications.MobileNetV2((32, 32, 3), weights=None, classes=5)
    model = from_classifier(source, inner_learning_rate=1e-9)
    images = rng.normal(size=(2, 32, 32, 3)).astype("float32")
    features = keras.Model(source.input, source.layers[-1].input)(images)
    np.testing.assert_allclose(model.features(images), features, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ops.softmax(model(images)), source(images), rtol=1e-4)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(images), model(images), rtol=1e-5, atol=1e-6)


def test_options_and_frozen_backbones():
    source = sequential(layers.Dense(3, activation="softmax"))
    source.layers[0].trainable = False
    dictionary = nsl_keras.layers.NeighborDictionary(7, metric="euclidean")
    model = nsl_keras.MetaNeighborhoodModel.from_classifier(
        source, dictionary, inner_steps=2
    )
    assert model.dictionary is dictionary
    assert model.neighborhood.inner_steps == 2
    assert not model.backbone.layers[0].trainable
    assert source.layers[-1].activation is keras.activations.softmax
    source.trainable = False
    images = np.ones((2, *source.input_shape[1:]), "float32")
    np.testing.assert_allclose(ops.softmax(model(images, adapt=False)), source(images))
    assert from_classifier(source)(images).shape == (2, 3)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, inputs):
        return self.dense(inputs)


def several_outputs():
    inputs = keras.Input((4,))
    return keras.Model(inputs, [layers.Dense(3)(inputs), layers.Dense(2)(inputs)])


def same_layer_twice():
    inputs = keras.Input((3,))
    dense = layers.Dense(3)
    return keras.Model(inputs, dense(dense(inputs)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Subclassed, "`model` must be a functional or Sequential model"),
        (lambda: keras.Sequential([layers.Dense(3)]), "and must be built"),
        (several_outputs, "`model` must have one output"),
        (same_layer_twice, "used 2 times"),
        (lambda: sequential(), "which ends in Dropout"),
        (lambda: sequential(layers.Dense(3), layers.ReLU()), "which ends in ReLU"),
        (
            lambda: sequential(layers.Dense(3), layers.Activation("tanh")),
            "which ends in Activation",
        ),
        (
            lambda: sequential(layers.Dense(3, activation="sigmoid")),
            "must end in a Dense or CosineDense.*activation='sigmoid'",
        ),
        (
            lambda: keras.Sequential([keras.Input((5, 4)), layers.Dense(3)]),
            r"of shape \(batch, classes\) or \(batch, targets\)",
        ),
        (lambda: sequential(layers.Dense(1)), "at least two classes"),
    ],
)
def test_models_that_cannot_be_split(make, message):
    with pytest.raises(ValueError, match=message):
        from_classifier(make())


@pytest.mark.parametrize("targets", [1, 2])
def test_a_trained_regressor(targets):
    source = sequential(layers.Dense(targets))
    model = from_classifier(source, task="regression", inner_learning_rate=1e-9)
    expected = ops.convert_to_numpy(source(IMAGES))
    np.testing.assert_allclose(model(IMAGES), expected, atol=1e-6)
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(IMAGES, np.ones((len(IMAGES), targets)), verbose=0)
    assert np.any(ops.convert_to_numpy(model(IMAGES)) != expected)
    np.testing.assert_array_equal(source(IMAGES), expected)


def test_a_regressor_ends_in_a_linear_layer():
    for end in (
        [layers.Dense(3, activation="softmax")],
        [layers.Dense(3), layers.Softmax()],
    ):
        with pytest.raises(ValueError, match="with linear outputs"):
            from_classifier(sequential(*end), task="regression")
