"""The last layers of models, found in their graphs, and what they do, found by trying."""

import keras
import pytest
from helpers import Subclassed
from keras import layers, ops

from nsl_keras import endings

INPUTS = keras.Input((6,))


def stack(*parts):
    return keras.Sequential([keras.Input((6,)), layers.Dense(5), layers.ReLU(), *parts])


def two_paths(end):
    one, other = layers.Dense(3, name="one"), layers.Dense(3, name="other")
    return keras.Model(INPUTS, end(one(INPUTS), other(layers.ReLU()(INPUTS))))


def nested(*parts, inner=(6,)):
    model = keras.Sequential([keras.Input(inner), *parts])
    return keras.Sequential([keras.Input((6,)), model, layers.Flatten()])


def names(calls):
    return [call.layer.name for call in calls]


def test_last_layers_and_what_follows_them():
    model = stack(layers.Dense(3, name="last"), layers.Dropout(0.5, name="drop"))
    last, after = endings.ending_of(model)
    assert (names(last), names(after)) == (["last"], ["drop"])
    last, after = endings.ending_of(two_paths(lambda a, b: a + ops.softmax(b)))
    assert (names(last), len(after)) == (["one", "other"], 2)
    shared = layers.Dense(3, name="shared")
    twice = keras.Model(INPUTS, shared(INPUTS) + shared(layers.ReLU()(INPUTS)))
    assert names(endings.ending_of(twice)[0]) == ["shared"]
    for inner in ((6,), (None,)):  # Keras walks the second anew, with the sizes outside.
        parts = [layers.ReLU(name="relu")]
        first = layers.Dense(6, name="last")
        model = stack(first, nested(*parts, inner=inner))
        last, after = endings.ending_of(model)
        assert (names(last), names(after)[-1]) == (["last"], "relu")


@pytest.mark.parametrize(
    "make",
    [
        lambda: stack(layers.Dense(3), layers.Dropout(0.5), layers.Reshape((3,))),
        lambda: stack(layers.Dense(3), layers.Lambda(lambda x: 2 * x)),
        lambda: stack(layers.Dense(3, dtype="mixed_float16"), layers.Activation("linear")),
        lambda: nested(layers.Dense(3)),
        lambda: two_paths(lambda one, other: one + other),
        lambda: layers.Dense(3),
        Subclassed,
    ],
)
def test_linear_ends(make):
    endings.require_linear(make(), "model")


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.Dense(3, "softmax"),
        lambda: stack(layers.Dense(3, "relu")),
        lambda: stack(layers.Dense(3, activation=layers.Softmax())),
        lambda: stack(layers.Dense(3, activation=ops.softmax)),
        lambda: stack(layers.Dense(3), layers.Softmax(), layers.Activation("linear")),
        lambda: stack(layers.Dense(3, "sigmoid", dtype="bfloat16"), layers.Dropout(0.5)),
        lambda: stack(layers.Dense(3), layers.Lambda(lambda x: ops.softmax(x))),
        lambda: nested(layers.Dense(3, "softmax")),
        lambda: two_paths(lambda one, other: ops.softmax(one) + other),
    ],
)
def test_others_are_refused(make):
    with pytest.raises(ValueError, match=r"`head` must return logits.*pass through '"):
        endings.require_linear(make(), "head")
