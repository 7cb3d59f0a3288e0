"""Checks of arguments and of data: what passes, and what the errors say."""

import re

import keras
import numpy as np
import pytest

from nsl_keras import validation

NO_NUMBERS = ["1", None, True, [1.0], 1j, np.ones(2), np.bool_(True)]
NOT_FINITE = [float("nan"), float("inf"), np.float32("inf")]


def one_of(value, name):
    # An iterator: the names must survive the search for the value.
    return validation.one_of(value, iter(("a", None, 1)), name)


def pair(value, name):
    return validation.positive_integers(value, 2, name)


#: Check, values that it returns, the type of these, its demand, and values that it refuses.
CHECKS = {
    "positive_integer": (
        *(validation.positive_integer, [1, np.int64(3), np.uint8(2)], int),
        *("a positive integer", [0, -1, 1.0, np.float32(2), (1,), *NO_NUMBERS]),
    ),
    "non_negative_integer": (
        *(validation.non_negative_integer, [0, 7, np.int64(3), 10**30], int),
        *("an integer of at least 0", [-1, 0.0, np.float32(2), (1,), *NO_NUMBERS]),
    ),
    "positive_number": (
        *(validation.positive_number, [1, np.float32(0.25), np.int64(2), 1e-300], float),
        *("a finite number above zero", [0, -0.5, *NOT_FINITE, *NO_NUMBERS]),
    ),
    "non_negative_number": (
        *(validation.non_negative_number, [0, 0.0, np.float32(0.25)], float),
        *("a finite number of at least zero", [-1, -1e-9, *NOT_FINITE, *NO_NUMBERS]),
    ),
    "fraction": (
        *(validation.fraction, [0, 0.0, np.float32(0.25), 0.999], float),
        *("a number in [0, 1)", [1, 1.0, -0.1, *NOT_FINITE, *NO_NUMBERS]),
    ),
    "boolean": (
        *(validation.boolean, [True, np.bool_(False)], bool),
        *("True or False", ["no", 0, 1, None, np.ones(1)]),
    ),
    "one_of": (
        *(one_of, ["a", 1], object),
        *("one of 'a', None, 1", ["A", "", 2, ["a"], {"a": 1}, np.ones(2)]),
    ),
    "positive_integers": (
        *(pair, [(3, np.int64(4))], tuple),
        "a positive integer or 2 of them",
        [0, "33", None, (1,), (1, 2, 3), (1, 0), (1, 2.0), (1, True), {}],
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_arguments(name):
    check, accepted, kind, demand, refused = CHECKS[name]
    for value in accepted:
        found = check(value, "x")
        assert found == value and isinstance(found, kind)
        assert validation.optional(check, value, "x") == value
    for value in refused:
        message = f"`size` must be {demand}. Received: size={value!r}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            check(value, "size")
    assert validation.optional(check, None, "x") is None
    assert validation.positive_integers(np.int32(3), 2, "x") == (3, 3)


#: NumPy does not count bfloat16 among its numbers.
HALF_PRECISION = keras.ops.convert_to_numpy(keras.ops.eye(3, dtype="bfloat16"))


def test_sound_data_pass():
    validation.require_finite(np.zeros((0, 3), "float32"), "x")
    validation.require_finite(np.array(["text"]), "x")
    for labels in (
        *([0, 1, 2, 2], np.array([[0], [2]])),
        np.array([], "int64"),
        np.eye(3, dtype="int32"),
        np.array([[0.9, 0.1, 0.0005]]),
        HALF_PRECISION,
    ):
        validation.require_class_labels(labels, 3)
    validation.require_class_labels(np.zeros((4, 1)), 1)
    validation.require_probabilities([[0.2, 0.8], [0.5, 0.5]], "values")
    validation.require_targets(np.zeros((4, 2)), 2)
    for targets in (np.zeros((4, 1)), np.zeros(4)):
        validation.require_targets(targets, 1)


NOT_FINITE = np.array([[0.0, np.nan], [1.0, np.inf]])
BFLOAT16 = keras.ops.convert_to_tensor(NOT_FINITE.astype("float32"), "bfloat16")


INFINITE = "`images` must be finite. Received: 2 others, the first at index (0, 1): nan"
CLASSES = "`y` must hold classes 0 to 2. Received: 2 others, the first at index (1,): 3"
ROWS = (
    "`y` must hold a probability distribution over the classes in each row (one-hot or "
    "soft labels, not several labels): numbers of at least 0 that sum to 1. Received: 2 "
    "others, the first at index (1,): [1, 0, 1]"
)
SHAPES = "`y.shape` must be (n,), (n, 1) or (n, 3). Received: y.shape=(4, 2)"
finite, labels = validation.require_finite, validation.require_class_labels
SUMS = "sum to 1. Received: 1 others, the first at index (1,): [0.5, 0.6]"


@pytest.mark.parametrize(
    ("check", "data", "argument", "message"),
    [
        (finite, NOT_FINITE, "images", INFINITE),
        (finite, keras.ops.convert_to_numpy(BFLOAT16), "images", INFINITE),
        (labels, [0, 3, 1, 4], 3, CLASSES),
        (labels, [0.0, -1.0], 3, "1 others, the first at index (1,)"),
        (labels, [0.0, 1.5], 3, "1 others, the first at index (1,)"),
        (labels, [[1, 0, 0], [1, 0, 1], [0, 0, 0]], 3, ROWS),
        (labels, [[1.5, -0.5, 0.0]], 3, "index (0,): [1.5, -0.5"),
        (labels, np.zeros((4, 2)), 3, SHAPES),
        (labels, 1, 3, "Received: y.shape=()"),
        (labels, ["cat", "dog"], 3, "`y` must be numbers; np.unique(na"),
        (validation.require_probabilities, [[0.5, 0.5], [0.5, 0.6]], "values", SUMS),
        (validation.require_targets, np.zeros(4), 2, "outputs, (n, 2). Received: y.sha"),
        (validation.require_targets, np.zeros((4, 2)), 1, "(n, 1) or (n,). Received: y"),
    ],
    ids=range(13),
)
def test_errors(check, data, argument, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check(data, argument)
