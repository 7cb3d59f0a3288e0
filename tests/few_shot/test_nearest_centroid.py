"""Nearest centroids against NumPy."""

import few_shot_episodes as data
import keras
import numpy as np
import pytest
from helpers import assert_all_equal
from keras import ops

from nsl_keras import few_shot

CENTER = np.linspace(-1, 1, data.SIZE).astype("float32")


@pytest.mark.parametrize(
    ("metric", "normalize"), [("cosine", True), ("euclidean", True), ("euclidean", False)]
)
def test_nearest_centroid(metric, normalize):
    inputs, _ = data.episodes(batch=3)
    options = {"metric": metric, "normalize": normalize}
    centered = keras.layers.Normalization(-1, CENTER, np.ones(data.SIZE))
    layers = [keras.Input((data.SIZE,)), centered]
    model = few_shot.NearestCentroid(keras.Sequential(layers), data.WAYS, **options)
    support, labels, queries = inputs
    prepare = data.unit if normalize else np.asarray
    support, queries = (prepare(each - CENTER) for each in (support, queries))
    means = np.eye(data.WAYS)[labels].swapaxes(1, 2) @ support / data.SHOTS
    expected = data.scores(queries, means, metric)
    np.testing.assert_allclose(model(inputs), expected, rtol=1e-4, atol=1e-5)


def test_the_backbone_stays_in_inference_mode():
    backbone = data.convolutional()
    inputs, _ = data.episodes(shape=(6, 6, 1))
    model = few_shot.NearestCentroid(backbone, data.WAYS)
    expected = ops.convert_to_numpy(model(inputs))
    weights = backbone.get_weights()
    np.testing.assert_array_equal(model(inputs, training=True), expected)
    assert_all_equal(backbone.get_weights(), weights)


def test_bytes_are_taken_as_they_are():
    (_, labels, _), _ = data.episodes()
    images = np.random.default_rng(0).integers(256, size=(2, 10, 6, 6, 1), dtype="uint8")
    support, queries = images[:, :6], images[:, 6:]
    model = few_shot.NearestCentroid(data.convolutional(), data.WAYS)
    found = model.predict((support, labels, queries), verbose=0)
    episode = (support.astype("float32"), labels, queries.astype("float32"))
    np.testing.assert_allclose(found, model(episode), rtol=1e-4, atol=1e-5)
