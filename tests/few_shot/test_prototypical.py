"""Prototypes, nearest centroids and neighborhoods without a step, against NumPy."""

import few_shot_episodes as data
import keras
import numpy as np
import pytest
from helpers import stacked
from keras import ops

from nsl_keras import few_shot

CENTER = np.linspace(-1, 1, data.SIZE).astype("float32")


@pytest.mark.parametrize(
    ("kind", "metric", "normalize"),
    [
        (few_shot.NearestCentroid, "cosine", True),
        (few_shot.NearestCentroid, "euclidean", False),
        (few_shot.ProtoNet, "euclidean", None),
    ],
)
def test_comparison_with_the_means_of_unequal_shots(kind, metric, normalize):
    """By cosines, or by minus the squared distances."""
    (support, _, queries), _ = data.episodes()
    labels = np.array([[0, 0, 0, 0, 1, 2], [2, 1, 1, 0, 2, 1]])
    given = {"temperature": 0.1} if normalize is None else {"normalize": normalize}
    centered = keras.layers.Normalization(-1, CENTER, np.ones(data.SIZE))
    model = kind(stacked((data.SIZE,), centered), data.WAYS, metric=metric, **given)
    found = model((support, labels, queries))
    prepare = data.unit if normalize else np.asarray
    support, queries = (prepare(each - CENTER) for each in (support, queries))
    membership = np.eye(data.WAYS)[labels]
    means = np.einsum("bsw,bsd->bwd", membership, support) / membership.sum(1)[..., None]
    expected = data.scores(queries, means, metric) / given.get("temperature", 1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_temperature_is_learned_by_its_logarithm():
    inputs, _ = data.episodes()
    options = {"temperature": 4.0, "learn_temperature": True}
    model = few_shot.ProtoNet(data.identity(), data.WAYS, **options)
    logits = ops.convert_to_numpy(model(inputs))
    (variable,) = model.trainable_variables
    assert np.isclose(float(variable.value), np.log(4.0))
    variable.assign(np.log(2.0))
    np.testing.assert_allclose(model(inputs), 2 * logits, rtol=1e-5)


def test_neighborhoods_at_rate_zero_are_the_nearest_centroid():
    inputs, _ = data.episodes()
    model = few_shot.NeighborhoodLearner(data.identity(), data.WAYS, scale=7.0)
    adapted = ops.convert_to_numpy(model(inputs))
    (raw,) = model.rate.weights
    raw.assign(0.0)
    centroids = few_shot.NearestCentroid(data.identity(), data.WAYS)
    expected = 7 * ops.convert_to_numpy(centroids(inputs))
    np.testing.assert_allclose(model(inputs), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(adapted - expected).max() > 0.01
