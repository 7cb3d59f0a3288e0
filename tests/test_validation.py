"""Checks of arguments and of data: what passes, and what the errors say."""

import re

import keras
import numpy as np
import pytest

from nsl_keras import validation


def received(name, value):
    return re.escape(f"Received: {name}={value!r}")


@pytest.mark.parametrize("value", ["a", "b", None, 1])
def test_one_of_returns_the_value(value):
    assert validation.one_of(value, ("a", "b", None, 1), "x") is value


@pytest.mark.parametrize("value", ["c", "A", "", 2, ["a"], {"a": 1}, np.ones(2)], ids=str)
def test_one_of_lists_what_is_allowed(value):
    message = rf"^`kind` must be one of 'a', 'b'\. {received('kind', value)}$"
    with pytest.raises(ValueError, match=message):
        # An iterator: the names must survive the search for the value.
        validation.one_of(value, iter(("a", "b")), "kind")


@pytest.mark.parametrize("value", [1, 7, np.int64(3), np.uint8(2)])
def test_positive_integer(value):
    result = validation.positive_integer(value, "x")
    assert result == value
    assert type(result) is int


@pytest.mark.parametrize("value", [0, -1, 1.0, np.float32(2), "1", None, True, (1,)])
def test_positive_integer_errors(value):
    message = rf"^`size` must be a positive integer\. {received('size', value)}$"
    with pytest.raises(ValueError, match=message):
        validation.positive_integer(value, "size")


@pytest.mark.parametrize("value", [0, 7, np.int64(3), np.uint8(0)])
def test_non_negative_integer(value):
    result = validation.non_negative_integer(value, "x")
    assert result == value
    assert type(result) is int


@pytest.mark.parametrize("value", [-1, 0.0, np.float32(2), "1", None, False, (1,)])
def test_non_negative_integer_errors(value):
    message = rf"^`seed` must be an integer of at least 0\. {received('seed', value)}$"
    with pytest.raises(ValueError, match=message):
        validation.non_negative_integer(value, "seed")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, (3, 3)),
        (np.int32(3), (3, 3)),
        ((1, 2), (1, 2)),
        ([np.int64(4), 5], (4, 5)),
    ],
)
def test_positive_integers(value, expected):
    result = validation.positive_integers(value, 2, "x")
    assert result == expected
    assert all(type(each) is int for each in result)


@pytest.mark.parametrize(
    "value",
    [0, -2, 1.5, "3", "33", None, True, (1,), (1, 2, 3), (1, 0), (1, 2.0), (1, True), {}],
    ids=repr,
)
def test_positive_integers_errors(value):
    message = (
        r"^`strides` must be a positive integer or 2 of them\. "
        rf"{received('strides', value)}$"
    )
    with pytest.raises(ValueError, match=message):
        validation.positive_integers(value, 2, "strides")


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.25), np.int64(2), 1e-300])
def test_positive_number(value):
    result = validation.positive_number(value, "x")
    assert result == value
    assert type(result) is float


@pytest.mark.parametrize(
    "value",
    [
        *(0, -0.5, float("nan"), float("inf"), np.float32("inf"), "1", None, True, [1.0]),
        # Above every float; complex, with and without an imaginary part; an array.
        *(10**400, 1j, np.complex64(1), np.ones(2), np.bool_(True)),
    ],
    ids=lambda value: str(value)[:12],
)
def test_positive_number_errors(value):
    message = rf"^`rate` must be a finite number above zero\. {received('rate', value)}$"
    with pytest.raises(ValueError, match=message):
        validation.positive_number(value, "rate")


@pytest.mark.parametrize("value", [0, 0.0, 1, 0.5, np.float32(0.25), np.int64(2)])
def test_non_negative_number(value):
    result = validation.non_negative_number(value, "x")
    assert result == value
    assert type(result) is float


@pytest.mark.parametrize(
    "value",
    [
        *(-1, -1e-9, float("nan"), float("inf"), np.float32("inf"), "1", None, True),
        *(10**400, 1j, np.complex64(1), np.ones(2), np.bool_(True)),
    ],
    ids=lambda value: str(value)[:12],
)
def test_non_negative_number_errors(value):
    message = (
        rf"^`rate` must be a finite number of at least zero\. {received('rate', value)}$"
    )
    with pytest.raises(ValueError, match=message):
        validation.non_negative_number(value, "rate")


@pytest.mark.parametrize("value", [0, 0.0, 0.5, np.float32(0.25), 0.999])
def test_fraction(value):
    result = validation.fraction(value, "x")
    assert result == value
    assert type(result) is float


@pytest.mark.parametrize("value", [1, 1.0, -0.1, float("nan"), "0.5", None, False, [0.5]])
def test_fraction_errors(value):
    message = rf"^`dropout` must be a number in \[0, 1\)\. {received('dropout', value)}$"
    with pytest.raises(ValueError, match=message):
        validation.fraction(value, "dropout")


def test_rank():
    assert validation.rank((None, 3, 4), 3) is None
    with pytest.raises(ValueError, match=r"must have rank 4.*input_shape=\(None, 3, 4\)"):
        validation.rank([None, 3, 4], 4)


@pytest.mark.parametrize(("axis", "expected"), [(-1, 5), (1, 3), (2, 4)])
def test_known_axis(axis, expected):
    assert validation.known_axis((None, 3, 4, 5), axis, "channel axis") == expected


@pytest.mark.parametrize(("axis", "shape"), [(-1, (2, 3, None)), (1, [2, None, 3])])
def test_known_axis_errors(axis, shape):
    message = rf"channel axis.* must be known.*{re.escape(str(tuple(shape)))}"
    with pytest.raises(ValueError, match=message):
        validation.known_axis(shape, axis, "channel axis")


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3)),
        np.zeros((0, 3), "float32"),
        [[1, 2], [3, 4]],
        np.array([np.iinfo("int64").max]),
        np.array([True, False]),
        np.array(["text"]),
        np.float16(65504.0),
    ],
    ids=lambda array: str(np.asarray(array).dtype),
)
def test_finite_passes(array):
    assert validation.finite(array, "x") is None


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_finite_errors(bad, dtype):
    array = np.zeros((2, 3, 2), "float32")
    array[1, 0, 1] = array[1, 2, 0] = bad
    if dtype == "bfloat16":
        array = keras.ops.convert_to_numpy(keras.ops.cast(array, dtype))
    else:
        array = array.astype(dtype)
    message = (
        r"^`images` must be finite\. Received: 2 NaN or infinite entries, "
        r"the first at index \(1, 0, 1\)\.$"
    )
    with pytest.raises(ValueError, match=message):
        validation.finite(array, "images")


@pytest.mark.parametrize(
    "labels",
    [
        [0, 1, 2, 2],
        np.array([[0], [2]]),
        np.array([0.0, 2.0], "float32"),
        np.array([], "int64"),
        np.eye(3),
        np.eye(3, dtype="int32"),
        np.full((4, 3), 1 / 3, "float32"),
        np.array([[0.9, 0.1, 0.0005]]),
    ],
    ids=str,
)
def test_class_labels_pass(labels):
    assert validation.class_labels(labels, 3) is None


def test_class_labels_of_a_single_class():
    validation.class_labels(np.zeros((4, 1)), 1)
    with pytest.raises(ValueError, match="must hold classes 0 to 0"):
        validation.class_labels(np.ones((4, 1)), 1)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            [0, 3, 1, 4],
            "`y` must hold classes 0 to 2. Received: 2 labels outside, the first at "
            "index 1: 3",
        ),
        ([0, 2, -1], "Received: 1 labels outside, the first at index 2: -1"),
        ([0.0, 1.5], "Received: 1 labels outside, the first at index 1: 1.5"),
        ([[2], [7]], "Received: 1 labels outside, the first at index 1: 7"),
        ([0.0, np.nan], "`y` must be finite. Received: 1 NaN"),
        (
            [[1, 0, 0], [1, 0, 1], [0, 0, 0]],
            "Each row of `y` must be a probability distribution over the 3 classes "
            "(one-hot or soft labels); multi-label targets are not supported. Received: "
            "2 other rows, the first at index 1: [1, 0, 1]",
        ),
        ([[1.5, -0.5, 0.0]], "Received: 1 other rows, the first at index 0: [1.5, -0.5"),
        ([[0.5, 0.4, 0.0]], "Received: 1 other rows"),
        ([[np.nan, 0.5, 0.5]], "`y` must be finite"),
        (
            np.zeros((4, 2)),
            "`y` must have shape (n,), (n, 1) or (n, 3). Received: y.shape=(4, 2)",
        ),
        (np.zeros((4, 1, 1)), "Received: y.shape=(4, 1, 1)"),
        (1, "Received: y.shape=()"),
    ],
    ids=str,
)
def test_class_labels_errors(labels, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validation.class_labels(labels, 3)


def test_class_labels_name_their_argument():
    with pytest.raises(ValueError, match="`query_labels` must hold classes 0 to 4"):
        validation.class_labels([5], 5, name="query_labels")


@pytest.mark.parametrize("labels", [["cat", "dog"], [None, 1]], ids=["text", "none"])
def test_class_labels_that_are_no_numbers(labels):
    with pytest.raises(ValueError, match="`y` must"):
        validation.class_labels(np.array(labels), 3)


def test_class_labels_accept_bfloat16_labels():
    # NumPy has no such kind of number of its own, `finite` takes it all the same.
    labels = keras.ops.convert_to_numpy(keras.ops.eye(3, dtype="bfloat16"))
    assert validation.class_labels(labels, 3) is None


@pytest.mark.parametrize("rows", [np.eye(3), [[0.2, 0.8]], np.full((2, 4), 0.25)], ids=str)
def test_probabilities_pass(rows):
    assert validation.probabilities(rows, "values") is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [[0.5, 0.5], [0.5, 0.6]],
            "Each row of `values` must be a probability distribution: numbers of at least "
            "0 that sum to 1. Received: 1 other rows, the first at index 1: [0.5, 0.6]",
        ),
        ([[1.5, -0.5]], "Received: 1 other rows, the first at index 0"),
        ([[np.nan, 1.0]], "`values` must be finite"),
    ],
    ids=str,
)
def test_probabilities_errors(rows, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validation.probabilities(np.array(rows), "values")


@pytest.mark.parametrize(
    ("targets", "outputs"),
    [(np.zeros((4, 2)), 2), (np.zeros((4, 1)), 1), (np.arange(4), 1)],
    ids=str,
)
def test_targets_pass(targets, outputs):
    assert validation.targets(targets, outputs) is None


@pytest.mark.parametrize(
    ("targets", "outputs", "message"),
    [
        (np.zeros(4), 2, "the head's outputs, (n, 2). Received: y.shape=(4,)"),
        (
            np.zeros((4, 2)),
            1,
            "the head's outputs, (n, 1) or (n,). Received: y.shape=(4, 2",
        ),
        (np.zeros((4, 2, 1)), 2, "Received: y.shape=(4, 2, 1)"),
        (1.0, 1, "Received: y.shape=()"),
        ([[np.inf, 0.0]], 2, "`y` must be finite"),
        ([["a", "b"]], 2, "`y` must hold numbers"),
    ],
    ids=str,
)
def test_targets_errors(targets, outputs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validation.targets(np.array(targets), outputs)
