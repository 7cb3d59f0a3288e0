"""Nearest centroids against NumPy."""

import few_shot_episodes as data
import keras
import numpy as np
import pytest
from helpers import assert_all_equal
from keras import ops

from nsl_keras import few_shot

CENTER = np.linspace(-1, 1, data.SIZE).astype("float32")


def scores(queries, references, metric):
    """Of each query with each reference: cosines, or minus the squared distances."""
    if metric == "cosine":
        return np.einsum("bqd,brd->bqr", data.unit(queries), data.unit(references))
    return -((queries[:, :, None] - references[:, None]) ** 2).sum(-1)


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
    expected = scores(queries, means, metric)
    np.testing.assert_allclose(model(inputs), expected, rtol=1e-4, atol=1e-5)


def test_the_backbone_stays_in_inference_mode():
    backbone = data.convolutional()
    inputs, _ = data.episodes(shape=(6, 6, 1))
    model = few_shot.NearestCentroid(backbone, data.WAYS)
    expected = ops.convert_to_numpy(model(inputs))
    weights = backbone.get_weights()
    np.testing.assert_array_equal(model(inputs, training=True), expected)
    assert_all_equal(backbone.get_weights(), weights)


def test_bytes_are_the_same_to_sampler_and_prediction():
    images = np.random.default_rng(0).integers(0, 256, (20, 6, 6, 1), "uint8")
    plain = data.convolutional()
    own = keras.Sequential(
        [keras.Input((6, 6, 1)), keras.layers.Rescaling(1 / 255), *plain.layers]
    )
    found = []
    for backbone, scale in ((plain, 1 / 255), (own, 1)):
        model = few_shot.NearestCentroid(backbone, 2)
        sampler = few_shot.EpisodeSampler(
            images, np.arange(20) // 10, ways=2, queries=3, scale=scale
        )
        episode = sampler.episodes(2)
        found.append(model.predict(episode[:3], verbose=0))
        if scale == 1:
            raw = [each.astype("uint8") for each in (episode[0], episode[2])]
            found.append(model.predict((raw[0], episode[1], raw[1]), verbose=0))
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-4, atol=1e-5)
