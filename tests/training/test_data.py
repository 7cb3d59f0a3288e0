"""Examples in every form that Keras's `predict` takes."""

import keras
import numpy as np
import pytest
from helpers import Batches
from keras import ops

import nsl_keras
from nsl_keras.training import data

X = np.arange(20.0).reshape(10, 2)
Y = np.arange(10)


def halves():
    return Batches((X[:5], Y[:5]), (X[5:], Y[5:]))


def endless():
    while True:
        yield X[:5], Y[:5]


@pytest.mark.parametrize(
    ("make", "in_memory", "expected"),
    [
        (lambda: X, True, X),
        (lambda: X.tolist(), True, X),
        (lambda: [X, Y], True, [X, Y]),
        (lambda: {"a": X, "b": ops.convert_to_tensor(Y)}, True, {"a": X, "b": Y}),
        (halves, False, X),
        (lambda: iter([X[:6], X[6:]]), False, X),
        (lambda: iter([({"a": X},), ({"a": X},)]), False, {"a": np.concatenate([X, X])}),
    ],
    ids=["array", "numbers", "list", "dict", "PyDataset", "generator", "dicts"],
)
def test_examples_are_gathered(make, in_memory, expected):
    assert data.is_in_memory(make()) is in_memory
    found, _ = data.gather(make())
    keras.tree.map_structure(np.testing.assert_array_equal, found, expected)


def test_targets_are_gathered():
    for arguments in ((X, Y), (halves(),), (iter([(X[:3], Y[:3]), (X[3:], Y[3:])]),)):
        np.testing.assert_array_equal(data.gather(*arguments)[1], Y)
    assert data.gather(X)[1] is None
    assert len(data.gather(endless(), steps=3)[1]) == 15
    with pytest.raises(ValueError, match="`x` must hold at least one batch"):
        data.gather(iter([]))


def test_a_function_sees_inputs_as_they_are():
    keras.config.set_dtype_policy("mixed_bfloat16")
    years = np.array([[2020.3], [2019.1]], "float32")
    found = data.predict(lambda batch: batch - 2020, keras.layers.Identity(), years)
    np.testing.assert_array_equal(found, years - 2020)


@pytest.mark.parametrize("make", [lambda: X, halves], ids=["array", "PyDataset"])
def test_a_function_is_applied_to_all_batches(make):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    sizes = []

    def both(batch):
        sizes.append(len(batch))
        outputs = model(batch)
        return {"outputs": outputs, "sums": ops.sum(outputs, axis=1)}

    found = data.predict(both, model, make(), batch_size=5)
    expected = model.predict(X, verbose=0)
    np.testing.assert_allclose(found["outputs"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["sums"], expected.sum(axis=1), rtol=1e-4, atol=1e-5)
    assert sizes == [5, 5]


class AddIfGiven(keras.layers.Layer):
    """The sum of two inputs, of which the second may be missing."""

    def call(self, x, y=None):
        return x if y is None else x + y

    def compute_output_shape(self, x_shape, y_shape=None):
        return x_shape


@pytest.mark.parametrize("second", [None, 0.5])
def test_optional_inputs(second):
    tensors = [keras.Input((4,)), keras.Input((4,), optional=True)]
    backbone = keras.Model(tensors, AddIfGiven()(*tensors))
    model, plain = (
        nsl_keras.MetaNeighborhoodModel(part, keras.layers.Dense(3), 6)
        for part in (backbone, None)
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)).astype("float32"), np.arange(12) % 3
    given = [x, None if second is None else np.full_like(x, second)]
    total = x + (second or 0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for each, inputs in ((model, given), (plain, total)):
        keras.utils.set_random_seed(0)
        each.compile("sgd", loss)
        each.initialize_from(inputs, y, seed=0)
        each.fit(inputs, y, verbose=0, shuffle=False)
        np.testing.assert_array_equal(data.gather(iter([(inputs, y)]))[1], y)
    plain.set_weights(model.get_weights())
    for name in ("predict", "neighbors"):
        found = getattr(model, name)(given, verbose=0)
        expected = getattr(plain, name)(total, verbose=0)
        keras.tree.map_structure(
            lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6),
            found,
            expected,
        )
    assert model.evaluate(given, y, verbose=0) == pytest.approx(
        plain.evaluate(total, y, verbose=0), rel=1e-5
    )
