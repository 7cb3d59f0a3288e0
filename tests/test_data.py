"""Examples in every form that `predict` takes, and what is refused."""

import keras
import numpy as np
import pytest

from nsl_keras import data

X = np.arange(20.0).reshape(10, 2)
Y = np.arange(10)


class Batches(keras.utils.PyDataset):
    def __init__(self, count):
        super().__init__()
        self.count = count

    @property
    def num_batches(self):
        return self.count

    def __getitem__(self, index):
        return X[5 * index : 5 * index + 5], Y[5 * index : 5 * index + 5]


def tensors():
    return [keras.ops.convert_to_tensor(X), keras.ops.convert_to_tensor(Y)]


def endless():
    while True:
        yield X[:5], Y[:5]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (lambda: X, X),
        (lambda: X.tolist(), X),
        (lambda: [X, Y], [X, Y]),
        (lambda: {"a": X, "b": Y}, {"a": X, "b": Y}),
        (tensors, [X, Y]),
        (lambda: Batches(2), X),
        (lambda: iter([X[:6], X[6:]]), X),
        (lambda: iter([({"a": X},), ({"a": X},)]), {"a": np.concatenate([X, X])}),
    ],
    ids=["array", "numbers", "list", "dict", "tensors", "PyDataset", "generator", "dicts"],
)
def test_everything_is_read(source, expected):
    found, _ = data.gathered(source())
    keras.tree.map_structure(np.testing.assert_array_equal, found, expected)
    sizes = [data.length_of(x) for x, _ in data.batches(source(), batch_size=4)]
    assert sum(sizes) == data.length_of(expected)


def test_targets_come_from_the_data_or_beside_them():
    for arguments in ((X, Y), (Batches(2),), (iter([(X[:3], Y[:3]), (X[3:], Y[3:])]),)):
        _, y = data.gathered(*arguments)
        np.testing.assert_array_equal(y, Y)
    assert data.gathered(X)[1] is None


def test_data_sets_of_tensorflow():
    import tensorflow as tf

    pairs = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    x, y = data.gathered(pairs)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    # A length that nobody knows is no end that is missing.
    assert len(data.gathered(pairs.filter(lambda x, y: True))[0]) == 10
    with pytest.raises(ValueError, match=r"`x` must end, .* or `steps` say how many"):
        data.gathered(pairs.repeat())
    assert len(data.gathered(pairs.repeat(), steps=2)[0]) == 8


def test_steps_end_what_has_no_end():
    assert len(data.gathered(endless(), steps=3)[0]) == 15
    assert len(data.gathered(Batches(None), steps=2)[0]) == 10
    with pytest.raises(ValueError, match="an endless Batches"):
        data.gathered(Batches(None))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (None, "`x` must be an array, a list.*type NoneType"),
        ("images", "`x` must be an array, a list.*type str"),
        (X[:0], "`x` must hold at least one example.*ndarray without any"),
        (iter([]), "`x` must hold at least one example"),
        ([X, Y[:5]], r"`x` must be arrays of the same length.*\[10, 5\]"),
    ],
    ids=["none", "text", "empty", "nothing", "lengths"],
)
def test_errors(x, message):
    with pytest.raises(ValueError, match=message):
        list(data.batches(x))


def test_targets_twice():
    with pytest.raises(ValueError, match="`y` must be None where `x` is a data set"):
        data.gathered(iter([(X, Y)]), Y)
