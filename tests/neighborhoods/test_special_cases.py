"""Kernel regression, nearest neighbours, votes and the plain model as special cases."""

import keras
import numpy as np
import pytest
from keras import ops
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

from nsl_keras.layers import MetaNeighborhoodHead

ENTRIES, FEATURES, OUTPUTS = 30, 4, 3
rng = np.random.default_rng(0)
KEYS = rng.normal(size=(ENTRIES, FEATURES)).astype("float32")
TARGETS = rng.normal(size=(ENTRIES, OUTPUTS)).astype("float32")
LABELS = np.arange(ENTRIES) % OUTPUTS
QUERIES = rng.normal(size=(16, FEATURES)).astype("float32")


class Constant(keras.layers.Layer):
    """The same outputs for every input: all that it has is a bias."""

    def __init__(self, units, initializer="zeros", **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.initializer = initializer

    def build(self, input_shape):
        self.constant = self.add_weight(
            name="constant", shape=(self.units,), initializer=self.initializer
        )

    def call(self, inputs):
        return ops.zeros_like(inputs[:, :1]) + self.constant

    def compute_output_shape(self, input_shape):
        return (input_shape[0], self.units)


def make_head(head, values, **options):
    options = {"metric": "euclidean", "learning_rate_form": "fixed", **options}
    layer = MetaNeighborhoodHead(head, ENTRIES, fixed_values=values, **options)
    layer.build((None, FEATURES))
    layer.dictionary.assign(keys=KEYS)
    return layer


def regressor(**options):
    """A constant head with squared error and a rate of one half, from random outputs."""
    head = Constant(OUTPUTS, keras.initializers.RandomNormal(stddev=3.0))
    options = {"temperature": 2.0, "inner_learning_rate": 0.5, **options}
    return make_head(head, TARGETS, task="regression", **options)


def nearest(k):
    """The k entries nearest each query, as a mask."""
    distances = ((QUERIES[:, None] - KEYS) ** 2).sum(axis=-1)
    return distances.argsort(axis=1).argsort(axis=1) < k


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_kernel_regression(metric, temperature):
    """`sum_j w_j v_j`, whatever the constant was before the step."""
    layer = regressor(metric=metric, temperature=temperature)
    if metric == "cosine":
        scores = QUERIES @ KEYS.T
        scores /= np.linalg.norm(QUERIES, axis=1)[:, None] * np.linalg.norm(KEYS, axis=1)
    else:
        scores = -((QUERIES[:, None] - KEYS) ** 2).sum(axis=-1)
    kernel = np.exp(scores / temperature)
    expected = kernel @ TARGETS / kernel.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(layer(QUERIES), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(ops.convert_to_numpy(layer(QUERIES, adapt=False)) - expected).max() > 1


def test_another_rate_is_no_kernel_regression():
    half, less = regressor(), regressor(inner_learning_rate=0.4)
    difference = ops.convert_to_numpy(half(QUERIES)) - ops.convert_to_numpy(less(QUERIES))
    assert np.abs(difference).max() > 0.1


@pytest.mark.parametrize("steps", [1, 3])
def test_low_temperature_is_the_nearest_neighbor(steps):
    """A constant that is the answer already stays it in further steps."""
    layer = regressor(temperature=1e-4, inner_steps=steps)
    expected = KNeighborsRegressor(1).fit(KEYS, TARGETS).predict(QUERIES)
    np.testing.assert_allclose(layer(QUERIES), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [1, 4, ENTRIES])
def test_uniform_attention_is_k_nearest_neighbors(k):
    """The k nearest entries take part, at a temperature that makes them all alike."""
    layer = regressor(temperature=1e7)
    outputs = layer.adapted_logits(QUERIES, ops.convert_to_tensor(nearest(k)))
    expected = KNeighborsRegressor(k).fit(KEYS, TARGETS).predict(QUERIES)
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rate", [1e-3, 1.0, 1e3])
def test_weighted_vote(rate):
    """From zero logits, for every rate: the class of the largest `sum_j w_j v_j`."""
    values = np.eye(OUTPUTS)[LABELS]
    layer = make_head(Constant(OUTPUTS), values, temperature=2.0, inner_learning_rate=rate)
    weights = ops.convert_to_numpy(layer.dictionary.attention(QUERIES))
    votes = weights @ values
    assert len(set(votes.argmax(axis=1))) == OUTPUTS
    found = ops.convert_to_numpy(layer(QUERIES))
    np.testing.assert_array_equal(found.argmax(axis=1), votes.argmax(axis=1))
    # One step from zero: rate * (vote - 1 / classes).
    np.testing.assert_allclose(found / rate, votes - 1 / OUTPUTS, atol=1e-5)


def test_majority_vote_of_the_nearest():
    layer = make_head(
        Constant(OUTPUTS),
        np.eye(OUTPUTS)[LABELS],
        temperature=1e7,
        inner_learning_rate=2.0,
    )
    found = layer.adapted_logits(QUERIES, ops.convert_to_tensor(nearest(7)))
    shares = KNeighborsClassifier(7).fit(KEYS, LABELS).predict_proba(QUERIES)
    assert len(set(shares.argmax(axis=1))) == OUTPUTS
    np.testing.assert_allclose(found, 2 * (shares - 1 / OUTPUTS), atol=1e-5)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_no_step_is_the_plain_model(task):
    head = keras.Sequential([keras.layers.Dense(5, "relu"), keras.layers.Dense(OUTPUTS)])
    layer = MetaNeighborhoodHead(head, ENTRIES, task=task, inner_learning_rate=1e-12)
    layer.build((None, FEATURES))
    plain = ops.convert_to_numpy(head(QUERIES))
    np.testing.assert_array_equal(layer(QUERIES, adapt=False), plain)
    np.testing.assert_allclose(layer(QUERIES), plain, rtol=1e-5, atol=1e-6)
