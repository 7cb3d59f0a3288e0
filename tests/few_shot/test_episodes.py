"""Episodes: what is in them, that they are the same again, and what bad input says."""

import time

import few_shot_episodes as data
import keras
import numpy as np
import pytest
from helpers import IS_TENSORFLOW

from nsl_keras import few_shot

EACH = 12  # Images of a class.


def numbered_images(classes=7, dtype="float32"):
    """Images whose every pixel is the image's own number, and classes in mixed order."""
    count = classes * EACH
    labels = np.random.default_rng(3).permutation(np.arange(count) % classes)
    numbers = np.arange(count, dtype=dtype)[:, None, None, None]
    return np.broadcast_to(numbers, (count, 2, 2, 1)), labels


def numbers_in(images):
    return images[..., 0, 0, 0].astype(int)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_shapes_and_dtypes():
    images, labels = numbered_images()
    sampler = few_shot.EpisodeSampler(images, labels, ways=3, shots=2, queries=4)
    episode, shapes = sampler.episode(5), [(6, 2, 2, 1), (6,), (12, 2, 2, 1), (12,)]
    assert [each.shape for each in episode] == shapes
    assert [each.dtype.name for each in episode] == ["float32", "int32"] * 2
    assert episode.support_labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert episode.query_labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert [each.shape for each in sampler.episodes(5)] == [(5, *each) for each in shapes]


@pytest.mark.parametrize("names", [False, True])
def test_images_stand_class_by_class_and_none_twice(names):
    images, labels = numbered_images()
    given = [f"class {label}" for label in labels] if names else labels[:, None]
    sampler = few_shot.EpisodeSampler(images, given, ways=4, shots=3, queries=5)
    for index in range(20):
        episode = sampler.episode(index)
        support = numbers_in(episode.support_images).reshape(4, 3)
        query = numbers_in(episode.query_images).reshape(4, 5)
        drawn = np.concatenate([support, query], axis=1)
        assert len(np.unique(drawn)) == 4 * 8
        assert (labels[drawn] == labels[drawn[:, :1]]).all()
        assert len(np.unique(labels[drawn[:, 0]])) == 4


def test_all_classes_and_images_are_drawn_equally():
    images, labels = numbered_images(classes=4)
    sampler = few_shot.EpisodeSampler(images, labels, ways=2, shots=1, queries=2)
    batch = sampler.episodes(2000)
    for part, per_episode in ((batch.support_images, 2), (batch.query_images, 4)):
        counts = np.bincount(numbers_in(part).ravel(), minlength=len(images))
        expected = 2000 * per_episode / len(images)
        # Six standard deviations of a Poisson count.
        assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)
    # The number of a class in an episode says nothing of the class.
    first = np.bincount(labels[numbers_in(batch.support_images)[:, 0]], minlength=4)
    assert np.abs(first - 500).max() < 6 * np.sqrt(500)


def test_an_episode_depends_on_seed_and_index_alone():
    images, labels = numbered_images()
    one, twin, other = (
        few_shot.EpisodeSampler(images, labels, ways=3, queries=4, seed=seed)
        for seed in (8, 8, 9)
    )
    late = one.episode(11)
    assert same(twin.episode(11), late)
    assert same((array[2] for array in one.episodes(4, start=9)), late)
    assert not same(one.episode(12), late)
    assert not same(other.episode(11), late)
    assert not same(other.episode(10), late)  # It is not their sum that counts.


def test_images_come_out_as_they_are_or_scaled():
    images, labels = numbered_images(dtype="uint8")
    sampler = few_shot.EpisodeSampler(images, labels, ways=3, queries=2)
    assert sampler.images.dtype == np.uint8
    assert np.shares_memory(sampler.images, images)
    drawn = sampler.episode(0).query_images
    assert drawn.dtype == np.float32
    for given in (images, images.astype("int64"), images.astype("float64")):
        scaled = few_shot.EpisodeSampler(given, labels, ways=3, queries=2, scale=1 / 255)
        np.testing.assert_allclose(
            255 * scaled.episode(0).query_images, drawn, rtol=1e-6, atol=0
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ways": 8}, r"`ways` must be at most the number of classes, 7\. .*ways=8"),
        ({"ways": 0}, r"`ways` must be a positive integer\. Received: ways=0"),
        ({"shots": 0}, r"`shots` must be a positive integer\. Received: shots=0"),
        ({"queries": 1.5}, r"`queries` must be a positive integer\. Received: queries=1.5"),
        ({"scale": 0}, r"`scale` must be a finite number above zero\. Received: scale=0"),
        ({"seed": -1}, r"`seed` must be an integer of at least 0\. Received: seed=-1"),
        ({"shots": 5, "queries": 8}, r"= 5 \+ 8 examples\. Received: 0, 1, 2.*12 at the"),
    ],
)
def test_bad_numbers(changes, message):
    images, labels = numbered_images()
    with pytest.raises(ValueError, match=message):
        few_shot.EpisodeSampler(images, labels, **{"ways": 3, "queries": 2} | changes)


def test_a_class_of_few_images_is_named():
    images, labels = numbered_images()
    names = np.array(["owl", "cat", "dog", "cow", "ant", "bee", "fox"])[labels]
    rare = np.flatnonzero(names == "bee")[4:]
    images, names = np.delete(images, rare, axis=0), np.delete(names, rare)
    with pytest.raises(ValueError, match=r"= 1 \+ 4 examples\. Received: 'bee' with 4 at"):
        few_shot.EpisodeSampler(images, names, queries=4)
    few_shot.EpisodeSampler(images, names, queries=3)


def test_bad_images():
    images, labels = numbered_images()
    bad = images.copy()
    bad[3, 0, 1, 0] = np.nan
    for given, message in (
        (images[1:], "84 labels for 83 examples"),
        (bad, r"`images` must be finite.*\(3, 0, 1, 0\)"),
        (images[:, :0], r"`images` must have shape.*\(84, 0, 2, 1\)"),
        (images.astype("bool"), r"`images` must hold numbers.*bool"),
    ):
        with pytest.raises(ValueError, match=message):
            few_shot.EpisodeSampler(given, labels)
    for given in (np.zeros(84), np.zeros((2, 42), int)):
        with pytest.raises(ValueError, match="`labels` must be class numbers or names"):
            few_shot.EpisodeSampler(images, given)


@pytest.mark.parametrize(("fresh", "steps"), [(True, 2), (False, 3)])
def test_fit_has_the_same_episodes_on_every_backend(fresh, steps):
    sampler = few_shot.EpisodeSampler(*numbered_images(), ways=3, queries=2)
    drawn = []

    class Spy(type(sampler.batches(2, steps))):
        def __getitem__(self, index):
            batch = super().__getitem__(index)
            if self._begun:
                drawn.append(numbers_in(batch[0][2])[0].tolist())
            return batch

    batches = Spy(sampler, 2, steps, 10, fresh)
    backbone = keras.Sequential([keras.Input((2, 2, 1)), keras.layers.Flatten()])
    model = few_shot.ProtoNet(backbone, 3, learn_temperature=True)
    model.compile(loss=data.cross_entropy(), run_eagerly=True)
    for _ in range(2):  # The second time the model is built.
        model.fit(batches, epochs=2, verbose=0)
    expected = [
        numbers_in(sampler.episode(10 + 2 * number).query_images).tolist()
        for number in (range(4 * steps) if fresh else list(range(steps)) * 4)
    ]
    # Building may have looked at one more; `fit` shuffles within an epoch.
    assert sorted(drawn[-4 * steps :]) == sorted(expected)
    assert model.predict(batches, verbose=0).shape == (2 * steps, 6, 3)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="JAX must not fork")
def test_workers_draw_the_same_episodes():
    sampler = few_shot.EpisodeSampler(*numbered_images(), ways=3, queries=2)

    class Slow(type(sampler.batches(1, 1))):
        def on_epoch_begin(self):
            time.sleep(0.1)
            super().on_epoch_begin()

    def losses(workers, processes):
        keras.utils.set_random_seed(0)
        backbone = keras.Sequential([keras.Input((2, 2, 1)), keras.layers.Flatten()])
        model = few_shot.ProtoNet(backbone, 3, temperature=1e4, learn_temperature=True)
        model.compile(keras.optimizers.SGD(0.0), data.cross_entropy())
        batches = Slow(sampler, 1, 3, 0, True)
        batches.workers, batches.use_multiprocessing = workers, processes
        history = model.fit(batches, epochs=3, verbose=0, shuffle=False).history
        return history["loss"]

    expected = losses(1, False)
    assert len(set(expected)) == 3
    for workers, processes in ((2, False), (1, True), (2, True)):
        np.testing.assert_allclose(losses(workers, processes), expected, rtol=1e-6)


def test_bad_batches():
    sampler = few_shot.EpisodeSampler(*numbered_images(), ways=3, queries=2)
    for name, value in {"batch_size": 0, "steps": 0, "start": -1}.items():
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            sampler.batches(**{"batch_size": 1, "steps": 1, name: value})


def test_from_dataset():
    images, labels = numbered_images(dtype="uint8")
    pairs = list(zip(images, labels, strict=True))
    named = ({"image": image, "label": label, "id": "x"} for image, label in pairs)
    expected = few_shot.EpisodeSampler(images, labels, 3, 2, 4, seed=6)
    for examples in (pairs, named):
        sampler = few_shot.EpisodeSampler.from_dataset(
            examples, ways=3, shots=2, queries=4, seed=6
        )
        assert same(sampler.episode(0), expected.episode(0))


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([(np.zeros((8, 4, 2, 3)), np.zeros(8, int))] * 2, "`labels` must be class"),
        ([(np.zeros((4, 2, 3)), np.eye(3, dtype=int)[0])] * 2, "`labels` must be class"),
        ([(np.zeros((size, 2, 3)), 0) for size in (4, 5)], "must have the same shape"),
        ([], r"an image and a label. Received: 0 examples"),
        ([(np.zeros((4, 2, 3)), 0, 1.0)] * 2, r"Received: 2 examples, of \[3\] parts"),
    ],
)
def test_from_a_dataset_of_other_examples(examples, message):
    with pytest.raises(ValueError, match=message):
        few_shot.EpisodeSampler.from_dataset(examples)


def test_equal_episodes_have_equal_fingerprints():
    images, labels = numbered_images()
    samplers = [
        few_shot.EpisodeSampler(images, labels, 3, 2, 4),
        few_shot.EpisodeSampler(images, labels, 3, 2, 4, seed=1),
        few_shot.EpisodeSampler(images, labels, 2, 2, 4),
        few_shot.EpisodeSampler(images, labels, 3, 2, 4, scale=2),
        few_shot.EpisodeSampler(images + 1, labels, 3, 2, 4),
    ]
    assert len({each.fingerprint for each in samplers}) == 5
    again = few_shot.EpisodeSampler(images.copy(order="F"), list(labels), 3, 2, 4)
    assert samplers[0].fingerprint == again.fingerprint and len(again.fingerprint) == 16
