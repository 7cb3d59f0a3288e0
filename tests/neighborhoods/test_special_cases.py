"""Kernel regression, nearest neighbors and votes as special cases."""

import keras
import numpy as np
import pytest
from helpers import as_numpy, assert_close, normal
from keras import ops
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor

from nsl_keras.layers import MetaNeighborhoodHead, NeighborDictionary

ENTRIES, FEATURES, OUTPUTS = 30, 4, 3
KEYS = normal(ENTRIES, FEATURES)
TARGETS = normal(ENTRIES, OUTPUTS, seed=1)
LABELS = np.arange(ENTRIES) % OUTPUTS
QUERIES = normal(16, FEATURES, seed=2)


def constant(initializer="zeros"):
    """The same outputs for every input: all that it has is a bias."""
    zero = keras.layers.Rescaling(0.0)
    dense = keras.layers.Dense(
        OUTPUTS, kernel_initializer="zeros", bias_initializer=initializer
    )
    return keras.Sequential([zero, dense])


def make_head(head, values, temperature, metric="euclidean", **options):
    dictionary = NeighborDictionary(
        ENTRIES, metric=metric, temperature=temperature, fixed_values=values
    )
    options = {"learning_rate_form": "fixed", **options}
    layer = MetaNeighborhoodHead(head, dictionary, **options)
    layer.build((None, FEATURES))
    dictionary.assign(keys=KEYS)
    return layer


def regressor(temperature=2.0, metric="euclidean", **options):
    """A constant head with squared error and a rate of one half, from random outputs."""
    head = constant(keras.initializers.RandomNormal(stddev=3.0))
    options = {"task": "regression", "inner_learning_rate": 0.5, **options}
    return make_head(head, TARGETS, temperature, metric, **options)


def voter(temperature=2.0, rate=2.0):
    values = np.eye(OUTPUTS)[LABELS]
    return make_head(constant(), values, temperature, inner_learning_rate=rate)


def nearest(k):
    """The k entries nearest each query, as a mask."""
    distances = ((QUERIES[:, None] - KEYS) ** 2).sum(axis=-1)
    return ops.convert_to_tensor(distances.argsort(axis=1).argsort(axis=1) < k)


@pytest.mark.parametrize(("metric", "temperature"), [("cosine", 0.3), ("euclidean", 2.0)])
def test_kernel_regression(metric, temperature):
    """`sum_j w_j v_j`, whatever the constant was before the step."""
    layer = regressor(temperature, metric)
    if metric == "cosine":
        scores = QUERIES @ KEYS.T
        scores /= np.linalg.norm(QUERIES, axis=1)[:, None] * np.linalg.norm(KEYS, axis=1)
    else:
        scores = -((QUERIES[:, None] - KEYS) ** 2).sum(axis=-1)
    kernel = np.exp(scores / temperature)
    expected = kernel @ TARGETS / kernel.sum(axis=1, keepdims=True)
    assert_close(layer(QUERIES), expected, 1e-4)
    assert np.abs(as_numpy(layer(QUERIES, adapt=False)) - expected).max() > 1


def test_low_temperature_is_the_nearest_neighbor():
    """A constant that is the answer already stays it in further steps."""
    layer = regressor(temperature=1e-4, inner_steps=3)
    expected = KNeighborsRegressor(1).fit(KEYS, TARGETS).predict(QUERIES)
    assert_close(layer(QUERIES), expected, 1e-4)


def test_uniform_attention_is_k_nearest_neighbors():
    """The nearest entries take part, at a temperature that makes them all alike."""
    outputs = regressor(temperature=1e7)(QUERIES, kept=nearest(4))
    expected = KNeighborsRegressor(4).fit(KEYS, TARGETS).predict(QUERIES)
    assert_close(outputs, expected, 1e-4)
    # Classes vote: the majority has the largest logit.
    outputs = voter(temperature=1e7)(QUERIES, kept=nearest(4))
    shares = KNeighborsClassifier(4).fit(KEYS, LABELS).predict_proba(QUERIES)
    assert_close(outputs, 2 * (shares - 1 / OUTPUTS), 1e-4)


@pytest.mark.parametrize("rate", [1e-3, 1e3])
def test_weighted_vote(rate):
    """From zero logits: for every rate the class of the largest `sum_j w_j v_j` wins."""
    layer = voter(rate=rate)
    votes = as_numpy(layer.dictionary.attention(QUERIES)) @ np.eye(OUTPUTS)[LABELS]
    assert len(set(votes.argmax(axis=1))) == OUTPUTS
    # One step from zero.
    assert_close(as_numpy(layer(QUERIES)) / rate, votes - 1 / OUTPUTS, 1e-4)
