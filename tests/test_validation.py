"""Checks of arguments and of data: what passes, and what the errors say."""

import re

import keras
import numpy as np
import pytest

from nsl_keras import validation

NO_NUMBERS = ["1", None, True, [1.0], 1j, np.ones(2), np.bool_(True)]
NOT_FINITE = [float("nan"), float("inf"), np.float32("inf")]

#: Check, values that it returns, its demand, and values that it refuses.
NUMBERS = {
    "positive_integer": (
        [1, 7, np.int64(3), np.uint8(2)],
        "a positive integer",
        [0, -1, 1.0, np.float32(2), "1", None, True, (1,)],
    ),
    "non_negative_integer": (
        [0, 7, np.int64(3), np.uint8(0), 10**30],
        "an integer of at least 0",
        [-1, 0.0, np.float32(2), "1", None, False, (1,)],
    ),
    "positive_number": (
        [1, 0.5, np.float32(0.25), np.int64(2), 1e-300],
        "a finite number above zero",
        [0, -0.5, *NOT_FINITE, *NO_NUMBERS],
    ),
    "non_negative_number": (
        [0, 0.0, 1, 0.5, np.float32(0.25), np.int64(2)],
        "a finite number of at least zero",
        [-1, -1e-9, *NOT_FINITE, *NO_NUMBERS],
    ),
    "fraction": (
        [0, 0.0, 0.5, np.float32(0.25), 0.999],
        "a number in [0, 1)",
        [1, 1.0, -0.1, *NOT_FINITE, *NO_NUMBERS],
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name):
    check = getattr(validation, name)
    accepted, demand, refused = NUMBERS[name]
    kind = int if "integer" in name else float
    for value in accepted:
        assert check(value, "x") == value
        assert type(check(value, "x")) is kind
    for value in refused:
        message = f"`size` must be {demand}. Received: size={value!r}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            check(value, "size")
    assert validation.optional(check, None, "x") is None
    assert validation.optional(check, accepted[0], "x") == accepted[0]


def test_one_of():
    for value in ("a", "b", None, 1):
        assert validation.one_of(value, ("a", "b", None, 1), "x") is value
    for value in ("c", "A", "", 2, ["a"], {"a": 1}, np.ones(2)):
        message = f"`kind` must be one of 'a', 'b'. Received: kind={value!r}"
        with pytest.raises(ValueError, match=re.escape(message)):
            # An iterator: the names must survive the search for the value.
            validation.one_of(value, iter(("a", "b")), "kind")


def test_positive_integers():
    for value, expected in ((np.int32(3), (3, 3)), ([np.int64(4), 5], (4, 5))):
        result = validation.positive_integers(value, 2, "x")
        assert result == expected
        assert all(type(each) is int for each in result)
    demand = "`strides` must be a positive integer or 2 of them"
    for value in (0, "33", None, (1,), (1, 2, 3), (1, 0), (1, 2.0), (1, True), {}):
        message = re.escape(f"{demand}. Received: strides={value!r}")
        with pytest.raises(ValueError, match=f"^{message}$"):
            validation.positive_integers(value, 2, "strides")


def test_boolean():
    assert validation.boolean(np.bool_(True), "x") is True
    for value in ("no", 0, 1, None, np.ones(1)):
        message = f"`pooled` must be True or False. Received: pooled={value!r}"
        with pytest.raises(ValueError, match=re.escape(message)):
            validation.boolean(value, "pooled")


#: NumPy does not count bfloat16 among its numbers.
HALF_PRECISION = keras.ops.convert_to_numpy(keras.ops.eye(3, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("check", "data", "argument"),
    [
        (validation.finite, np.zeros((0, 3), "float32"), "x"),
        (validation.finite, np.array(["text"]), "x"),
        (validation.class_labels, [0, 1, 2, 2], 3),
        (validation.class_labels, np.array([[0], [2]]), 3),
        (validation.class_labels, np.array([], "int64"), 3),
        (validation.class_labels, np.eye(3, dtype="int32"), 3),
        (validation.class_labels, np.array([[0.9, 0.1, 0.0005]]), 3),
        (validation.class_labels, np.zeros((4, 1)), 1),
        (validation.class_labels, HALF_PRECISION, 3),
        (validation.probabilities, [[0.2, 0.8], [0.5, 0.5]], "values"),
        (validation.targets, np.zeros((4, 2)), 2),
        (validation.targets, np.zeros((4, 1)), 1),
    ],
)
def test_sound_data_pass(check, data, argument):
    check(data, argument)


def not_finite(bad, dtype):
    array = np.where(np.arange(12).reshape(2, 3, 2) % 3 == 1, bad, 0.0)
    if dtype == "float64":
        return array
    array = keras.ops.cast(array.astype("float32"), dtype)  # NumPy lacks bfloat16.
    return keras.ops.convert_to_numpy(array)


INFINITE = (
    "`images` must be finite. Received: 4 NaN or infinite entries, the first at index "
    "(0, 0, 1)"
)
CLASSES = (
    "`y` must hold classes 0 to 2. Received: 2 labels outside, the first at index 1: 3"
)
ROWS = (
    "Each row of `y` must be a probability distribution over the classes (one-hot or soft "
    "labels, not several labels): numbers of at least 0 that sum to 1. Received: 2 bad "
    "rows, the first at index 1: [1, 0, 1]"
)
SHAPES = "`y` must have shape (n,), (n, 1) or (n, 3). Received: y.shape=(4, 2)"
DISTRIBUTIONS = "sum to 1. Received: 1 bad rows, the first at index 1: [0.5, 0.6]"


@pytest.mark.parametrize(
    ("check", "data", "argument", "message"),
    [
        *(
            (validation.finite, not_finite(bad, dtype), "images", INFINITE)
            for bad in (np.nan, -np.inf)
            for dtype in ("float16", "float64", "bfloat16")
        ),
        (validation.class_labels, [0, 3, 1, 4], 3, CLASSES),
        (validation.class_labels, [0, 2, -1], 3, "1 labels outside, the first at index 2"),
        (validation.class_labels, [0.0, 1.5], 3, "1 labels outside, the first at index 1"),
        (validation.class_labels, [0.0, np.nan], 3, "`y` must be finite. Received: 1 NaN"),
        (validation.class_labels, [[1, 0, 0], [1, 0, 1], [0, 0, 0]], 3, ROWS),
        (validation.class_labels, [[1.5, -0.5, 0.0]], 3, "index 0: [1.5, -0.5"),
        (validation.class_labels, np.zeros((4, 2)), 3, SHAPES),
        (validation.class_labels, 1, 3, "Received: y.shape=()"),
        (validation.class_labels, ["cat", "dog"], 3, "`y` must hold numbers; np.unique(na"),
        (validation.probabilities, [[0.5, 0.5], [0.5, 0.6]], "values", DISTRIBUTIONS),
        (validation.targets, np.zeros(4), 2, "outputs, (n, 2). Received: y.shape=(4,)"),
        (validation.targets, np.zeros((4, 2)), 1, "(n, 1) or (n,). Received: y.shape=(4,"),
        (validation.targets, 1.0, 1, "Received: y.shape=()"),
    ],
    ids=range(19),
)
def test_errors(check, data, argument, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check(data, argument)
