"""Examples in every form that Keras's `predict` takes."""

import keras
import numpy as np
import pytest
from helpers import CROSS_ENTROPY, IS_TENSORFLOW, Batches, assert_close, keras_3_15, normal
from keras import ops

import nsl_keras
from nsl_keras.training import data

X = np.arange(20.0).reshape(10, 2)
Y = np.arange(10)


def halves():
    return Batches((X[:5], Y[:5]), (X[5:], Y[5:]))


@pytest.mark.parametrize(
    ("make", "in_memory", "expected"),
    [
        (lambda: X.tolist(), True, X),
        (lambda: {"a": X, "b": ops.convert_to_tensor(Y)}, True, {"a": X, "b": Y}),
        (halves, False, X),
        (lambda: iter([X[:6], X[6:]]), False, X),
        (lambda: iter([({"a": X},), ({"a": X},)]), False, {"a": np.concatenate([X, X])}),
    ],
    ids=["numbers", "dict", "PyDataset", "generator", "dicts"],
)
def test_examples_are_gathered(make, in_memory, expected):
    """With their targets, if there are any."""
    assert data.is_in_memory(make()) is in_memory
    found, y = data.gather(make())
    keras.tree.map_structure(np.testing.assert_array_equal, found, expected)
    assert y.tolist() == Y.tolist() if make is halves else y is None


def test_a_function_sees_inputs_as_they_are():
    keras.config.set_dtype_policy("mixed_bfloat16")
    years, sizes = np.array([[2020.3], [2019.1], [2018.2]], "float32"), []

    def since_2020(batch):
        sizes.append(len(batch))
        return batch - 2020

    found = data.predict(since_2020, keras.layers.Identity(), years, batch_size=2)
    np.testing.assert_array_equal(found, years - 2020)
    assert sizes == [2, 1]


class First(keras.layers.Layer):
    """The first of two inputs, of which the second may be missing."""

    def call(self, x, y=None):
        return x


@keras_3_15
def test_optional_inputs():
    tensors = [keras.Input((4,)), keras.Input((4,), optional=True)]
    backbone = keras.Model(tensors, First()(*tensors))
    model = nsl_keras.MetaNeighborhoodModel(backbone, keras.layers.Dense(3), 6)
    x, y = normal(12, 4), np.arange(12) % 3
    given = [x, None]
    np.testing.assert_array_equal(data.gather(iter([(given, y)]))[1], y)
    drawn = model.initialize_from(given, y, seed=0)
    assert_close(model.dictionary.keys, x[drawn])
    model.compile("sgd", CROSS_ENTROPY, run_eagerly=True)
    model.fit(given, y, verbose=0)
    logits = model.neighborhood(x)
    assert_close(model.predict(given, verbose=0), logits)
    found, expected = model.neighbors(given), model.neighborhood.neighbors(x, 5)
    assert_close(found.weights, expected.weights)
    expected = float(CROSS_ENTROPY(y, logits))
    assert model.evaluate(given, y, verbose=0) == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="strings are TensorFlow's alone")
@pytest.mark.parametrize("form", ["text", "batches"])
def test_text_reaches_models(form, eager):
    words = np.array([["füchs"], ["owl"], ["elk"]] * 4)
    lookup = keras.layers.StringLookup(vocabulary=["füchs", "owl"], output_mode="one_hot")
    inputs = keras.Input((1,), dtype="string")
    backbone = keras.Model(inputs, lookup(inputs))
    y, x = np.arange(12) % 3, ops.convert_to_tensor(words, "string")
    given = [words, y] if form == "text" else [Batches((x[:5], y[:5]), (x[5:], y[5:]))]
    model = nsl_keras.MetaNeighborhoodModel(backbone, keras.layers.Dense(3), 6)
    model.build((None, 1))
    drawn = model.initialize_from(*given, seed=0)
    assert_close(model.dictionary.keys, backbone(x).numpy()[drawn])
    adapted = nsl_keras.few_shot.NearestCentroid(backbone).adapt(*given)
    assert adapted.predict(x[:3], verbose=0).argmax(axis=1).tolist() == [0, 1, 2]


@pytest.mark.skipif(not IS_TENSORFLOW, reason="JAX has no ragged tensors")
def test_ragged_examples_are_named():
    import tensorflow as tf

    ragged = tf.ragged.constant([[1, 2], [3]])
    for given in ({"x": ragged}, tf.data.Dataset.from_tensors((ragged, [0, 1]))):
        with pytest.raises(ValueError, match=r"`x` must be dense.*RaggedTensor"):
            data.gather(given)


def test_strings_of_tensorflow_become_text():
    names = ["füchs", "owl"]
    encoded = np.array([each.encode() for each in names], object)
    for found in data.gather(encoded, encoded) + data.gather(iter([(encoded, encoded)])):
        assert found.tolist() == names
