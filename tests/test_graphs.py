"""The layers and the end of a model, found by types alone."""

import keras
import pytest
from helpers import Subclassed
from keras import layers, ops

from nsl_keras import MetaNeighborhoodModel, graphs

INPUTS = keras.Input((6,))
from_classifier = MetaNeighborhoodModel.from_classifier


def stack(*parts):
    return keras.Sequential([keras.Input((6,)), layers.Dense(5), layers.ReLU(), *parts])


def functional(*parts):
    outputs = layers.Dense(5)(INPUTS)
    for part in parts:
        outputs = part(outputs)
    return keras.Model(INPUTS, outputs)


def nested(*parts):
    model = keras.Sequential([keras.Input((6,)), *parts])
    return keras.Sequential([keras.Input((6,)), model, layers.Flatten()])


def two_paths(end):
    one, other = layers.Dense(3, name="one"), layers.Dense(3, name="other")
    return keras.Model(INPUTS, end(one(INPUTS), other(layers.ReLU()(INPUTS))))


@pytest.mark.parametrize("make", [stack, functional, lambda *end: nested(*end)])
def test_the_last_layer_and_what_follows_it(make):
    parts = layers.Dense(3, name="last"), layers.Dropout(0.5), layers.Reshape((3,))
    last, after = graphs.ending(make(*parts))
    assert last.name == "last"
    kinds = [layers.Reshape, layers.Dropout]
    assert [type(each) for each in after][-2:] == kinds  # Behind a Flatten if nested.


@pytest.mark.parametrize(
    "model",
    [
        two_paths(lambda one, other: one + other),
        two_paths(lambda one, other: [one, other]),
        keras.Model(INPUTS, layers.Flatten()(INPUTS)),
    ],
)
def test_there_is_no_last_layer(model):
    assert graphs.ending(model)[0] is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: stack(layers.Dense(3), layers.Dropout(0.5), layers.Reshape((3,))),
        lambda: stack(layers.Dense(3), layers.Rescaling(0.5)),
        lambda: stack(layers.Dense(3, dtype="mixed_float16"), layers.Activation("linear")),
        lambda: nested(layers.Dense(3)),
        lambda: keras.Model(INPUTS, INPUTS),
        lambda: layers.Dense(3),
        Subclassed,
    ],
)
def test_linear_ends(make):
    graphs.require_linear(make(), "model")


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.Dense(3, "softmax"),
        lambda: stack(layers.Dense(4112, "softmax")),
        lambda: stack(layers.Dense(3, activation=layers.Softmax())),
        lambda: stack(layers.Dense(3), layers.Softmax(), layers.Activation("linear")),
        lambda: stack(layers.Dense(3, "sigmoid", dtype="bfloat16"), layers.Dropout(0.5)),
        lambda: stack(layers.Dense(3), layers.Lambda(lambda x: x)),
        lambda: nested(layers.Dense(3, "softmax")),
        lambda: two_paths(lambda one, other: ops.softmax(one) + other),
    ],
)
def test_others_are_refused(make):
    with pytest.raises(ValueError, match=r"`head` must return logits.*pass through '"):
        graphs.require_linear(make(), "head")


@pytest.mark.parametrize(
    ("end", "task"),
    [
        *((layers.Activation(name), "classification") for name in ("relu", "sigmoid")),
        (layers.Lambda(lambda x: ops.clip(x, -10, 10)), "classification"),
        (layers.Rescaling(1.0, offset=0.015), "regression"),
        (layers.Softmax(axis=0), "classification"),
        (layers.Softmax(), "regression"),
    ],
)
def test_other_ends_are_refused_by_name(end, task):
    """`from_classifier` predicts what its source predicts."""
    with pytest.raises(ValueError, match=f"must end in .*'{end.name}'"):
        from_classifier(stack(layers.Dense(3), end), 3, task=task)
