"""Nearest neighbours and centroids against NumPy and scikit-learn."""

import few_shot_episodes as data
import keras
import numpy as np
import pytest
from keras import ops
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid

from nsl_keras import few_shot

CENTER = np.linspace(-1, 1, data.SIZE).astype("float32")
BASE = np.random.default_rng(9).normal(CENTER, size=(300, data.SIZE)).astype("float32")


def predictions(model, inputs):
    return ops.convert_to_numpy(ops.argmax(model(inputs), axis=-1))


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_nearest_neighbor(metric, one_thread):
    inputs, _ = data.episodes(batch=3, queries=20)
    model = few_shot.NearestNeighbor(data.identity(), data.WAYS, metric=metric)
    model.center_on(BASE, batch_size=128)
    shift, found = BASE.mean(axis=0), predictions(model, inputs)
    for support, labels, queries, own in zip(*inputs, found, strict=True):
        nearest = KNeighborsClassifier(1, metric=metric).fit(support - shift, labels)
        np.testing.assert_array_equal(own, nearest.predict(queries - shift))


def test_nearest_neighbor_logits():
    inputs, _ = data.episodes()
    support, labels, queries = inputs
    found = few_shot.NearestNeighbor(data.identity(), data.WAYS)(inputs)
    cosines = np.einsum("bqd,bsd->bqs", data.unit(queries), data.unit(support))
    is_own = labels[:, None, :, None] == np.arange(data.WAYS)
    expected = np.where(is_own, cosines[..., None], -np.inf).max(axis=2)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalize", [False, True])
def test_nearest_centroid(normalize):
    inputs, _ = data.episodes(batch=3, queries=20)
    options = {"metric": "euclidean", "normalize": normalize}
    model = few_shot.NearestCentroid(data.identity(), data.WAYS, **options)
    model.center_on(BASE, batch_size=100)
    shift, prepare = BASE.mean(axis=0), data.unit if normalize else np.asarray
    found = predictions(model, inputs)
    for support, labels, queries, own in zip(*inputs, found, strict=True):
        nearest = NearestCentroid().fit(prepare(support - shift), labels)
        np.testing.assert_array_equal(own, nearest.predict(prepare(queries - shift)))


def test_cosines_with_the_centroids():
    inputs, _ = data.episodes()
    support, labels, queries = inputs
    found = few_shot.NearestCentroid(data.identity(), data.WAYS)(inputs)
    means = np.eye(data.WAYS)[labels].swapaxes(1, 2) @ data.unit(support)
    expected = np.einsum("bqd,bwd->bqw", data.unit(queries), data.unit(means))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_backbone_stays_in_inference_mode():
    backbone = data.convolutional()
    inputs, _ = data.episodes(shape=(6, 6, 1))
    model = few_shot.NearestCentroid(backbone, data.WAYS)
    expected = ops.convert_to_numpy(model(inputs))
    weights = backbone.get_weights()
    np.testing.assert_array_equal(model(inputs, training=True), expected)
    for new, old in zip(backbone.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(new, old)


def test_the_center_is_stored(tmp_path):
    inputs, _ = data.episodes()
    model = few_shot.NearestCentroid(data.identity(), data.WAYS)
    plain = ops.convert_to_numpy(model(inputs))
    model.center_on(BASE)
    np.testing.assert_allclose(model.center, BASE.mean(axis=0), rtol=1e-4, atol=1e-6)
    centered = ops.convert_to_numpy(model(inputs))
    assert np.abs(centered - plain).max() > 0.1
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(inputs), centered)


def test_bytes_are_the_same_to_sampler_center_and_prediction():
    images = np.random.default_rng(0).integers(0, 256, (20, 6, 6, 1), "uint8")
    plain = data.convolutional()
    own = keras.Sequential(
        [keras.Input((6, 6, 1)), keras.layers.Rescaling(1 / 255), *plain.layers]
    )
    found = []
    for backbone, given, scale in ((plain, images / 255, 1 / 255), (own, images, 1)):
        model = few_shot.NearestCentroid(backbone, 2)
        model.center_on(given, batch_size=7)
        sampler = few_shot.EpisodeSampler(
            images, np.arange(20) // 10, ways=2, queries=3, scale=scale
        )
        episode = sampler.episodes(2)
        found.append(model.predict(episode[:3], verbose=0))
        if scale == 1:
            raw = [each.astype("uint8") for each in (episode[0], episode[2])]
            found.append(model.predict((raw[0], episode[1], raw[1]), verbose=0))
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-4, atol=1e-5)


def test_images_that_give_no_center():
    model = few_shot.NearestCentroid(data.identity(), data.WAYS)
    with pytest.raises(ValueError, match="`features` must be finite"):
        model.center_on(np.full((2, data.SIZE), np.nan))
    model = few_shot.NearestCentroid(data.convolutional(), batch_normalization="support")
    with pytest.raises(ValueError, match="`batch_normalization` must be"):
        model.center_on(np.zeros((2, 6, 6, 1)))
