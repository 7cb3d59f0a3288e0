"""Metrics against float64, far from zero too."""

import keras
import numpy as np
import pytest
from helpers import as_numpy, assert_close, normal, refused

from nsl_keras import key_metrics
from nsl_keras.layers import NeighborDictionary


def exact_distances(queries, keys):
    queries, keys = queries.astype("float64"), keys.astype("float64")
    return -((queries[:, None] - keys) ** 2).sum(axis=-1)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_against_numpy(metric):
    queries, keys = normal(4, 5), normal(6, 5, seed=1, dtype="float64")
    if metric == "cosine":
        lengths = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(keys, axis=1)
        expected = queries @ keys.T / lengths
    else:
        expected = exact_distances(queries, keys)
    assert_close(key_metrics.get(metric)(queries, keys), expected)
    if metric == "euclidean":
        distance = key_metrics.Euclidean(squared=False)
        serialize = keras.saving.serialize_keras_object
        assert_close(distance(queries, keys), -np.sqrt(-expected))
        assert key_metrics.get(serialize(distance)).squared is False
        with refused("`squared` must be .*'no'"):
            key_metrics.Euclidean(squared="no")


def test_distances_far_from_zero():
    """Years as keys: `2qk - q^2 - k^2` alone would give equal weights of 0.5."""
    dictionary = NeighborDictionary(31, 2, metric="euclidean", temperature=0.2)
    dictionary.build((None, 1))
    dictionary.assign(keys=np.arange(1990.0, 2021.0)[:, None])
    weights = as_numpy(dictionary.attention([[2003.4]]))[0]
    np.testing.assert_allclose(weights[13:15], [0.731, 0.269], atol=2e-3)
    queries, keys = 50 + normal(8, 256), 50 + normal(20, 256, seed=1)
    found = key_metrics.Euclidean()(queries, keys)
    np.testing.assert_allclose(found, exact_distances(queries, keys), rtol=1e-4)
