"""Episodes: what is in them, that they are the same again; splits of their classes."""

import time

import few_shot_episodes as data
import keras
import numpy as np
import pytest
from helpers import CROSS_ENTROPY, IS_TENSORFLOW, refused, refusing

from nsl_keras import few_shot

EACH = 12  # Images of a class.


def numbered_images(classes=7):
    """Images whose every pixel is the image's own number, and classes in mixed order."""
    count = classes * EACH
    labels = np.random.default_rng(3).permutation(np.arange(count) % classes)
    numbers = np.arange(count, dtype="float32")[:, None, None, None]
    return np.broadcast_to(numbers, (count, 2, 2, 1)), labels


IMAGES, LABELS = numbered_images()


def make_sampler(images=IMAGES, labels=LABELS, ways=3, queries=2, **options):
    return few_shot.EpisodeSampler(images, labels, ways, queries=queries, **options)


def numbers_in(images):
    return images[..., 0, 0, 0].astype(int)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_labels_and_dtypes():
    episode = make_sampler(shots=2, queries=4).episode(5)
    assert [each.dtype.name for each in episode] == ["float32", "int32"] * 2
    assert episode.support_labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert episode.query_labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("names", [False, True])
def test_images_stand_class_by_class_and_none_twice(names):
    given = [f"class {label}" for label in LABELS] if names else LABELS[:, None]
    sampler = make_sampler(labels=given, ways=4, shots=3, queries=5)
    for index in range(20):
        episode = sampler.episode(index)
        support = numbers_in(episode.support_images).reshape(4, 3)
        query = numbers_in(episode.query_images).reshape(4, 5)
        drawn = np.concatenate([support, query], axis=1)
        assert len(np.unique(drawn)) == 4 * 8
        assert (LABELS[drawn] == LABELS[drawn[:, :1]]).all()
        assert len(np.unique(LABELS[drawn[:, 0]])) == 4


def test_all_classes_and_images_are_drawn_equally():
    images, labels = numbered_images(classes=4)
    batch = make_sampler(images, labels, ways=2).episodes(2000)
    for part, per_episode in ((batch.support_images, 2), (batch.query_images, 4)):
        counts = np.bincount(numbers_in(part).ravel(), minlength=len(images))
        expected = 2000 * per_episode / len(images)
        # Six standard deviations of a Poisson count.
        assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)
    # The number of a class in an episode says nothing of the class.
    first = np.bincount(labels[numbers_in(batch.support_images)[:, 0]], minlength=4)
    assert np.abs(first - 500).max() < 6 * np.sqrt(500)


def test_an_episode_depends_on_seed_and_index_alone():
    one, twin, other = (make_sampler(queries=4, seed=seed) for seed in (8, 8, 9))
    late = one.episode(11)
    assert same(twin.episode(11), late)
    assert same((array[2] for array in one.episodes(4, start=9)), late)
    assert not same(one.episode(12), late)
    assert not same(other.episode(11), late)
    assert not same(other.episode(10), late)  # It is not their sum that counts.


def test_images_come_out_as_they_are_or_scaled():
    images = IMAGES.astype("uint8")
    sampler = make_sampler(images)
    assert sampler.images.dtype == np.uint8
    assert np.shares_memory(sampler.images, images)
    drawn = sampler.episode(0).query_images
    assert drawn.dtype == np.float32
    for given in (images, images.astype("int64"), images.astype("float64")):
        scaled = make_sampler(given, scale=1 / 255).episode(0).query_images
        np.testing.assert_allclose(255 * scaled, drawn, rtol=1e-6, atol=0)


def test_fit_has_the_same_episodes_on_every_backend():
    drawn = set()

    class Noting(few_shot.EpisodeSampler):
        def episodes(self, count, start=0):
            drawn.update(range(start, start + count))
            return super().episodes(count, start)

    sampler = Noting(IMAGES, LABELS, 3, queries=2)
    batches, held_out = sampler.batches(2, 2, start=10), sampler.batches(1, 2, start=90)
    model = few_shot.ProtoNet(data.identity(2, 2, 1), 3, learn_temperature=True)
    model.compile(loss=CROSS_ENTROPY, run_eagerly=True)
    for _ in range(2):  # The second time the model is built.
        model.fit(batches, epochs=2, validation_data=held_out, verbose=0)
    assert drawn == {*range(10, 10 + 2 * 2 * 2 * 2), 90, 91}
    assert model.predict(batches, verbose=0).shape == (4, 6, 3)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="JAX must not fork")
def test_workers_draw_the_same_episodes():
    sampler = make_sampler()

    class Slow(type(sampler.batches(1, 1))):
        def on_epoch_begin(self):
            time.sleep(0.1)
            super().on_epoch_begin()

    def losses(workers, processes):
        keras.utils.set_random_seed(0)
        options = {"temperature": 1e4, "learn_temperature": True}
        model = few_shot.ProtoNet(data.identity(2, 2, 1), 3, **options)
        model.compile(keras.optimizers.SGD(0.0), CROSS_ENTROPY, run_eagerly=True)
        batches = Slow(sampler, 1, 3, 0)
        batches.workers, batches.use_multiprocessing = workers, processes
        return model.fit(batches, epochs=3, verbose=0, shuffle=False).history["loss"]

    expected = losses(1, False)
    assert len(set(expected)) == 3
    for workers, processes in ((2, False), (2, True)):
        np.testing.assert_allclose(losses(workers, processes), expected, rtol=1e-6)


def test_from_dataset():
    pairs = list(zip(IMAGES, LABELS, strict=True))
    named = ({"image": image, "label": label, "id": "x"} for image, label in pairs)
    options = {"ways": 3, "shots": 2, "queries": 4, "seed": 6}
    for examples in (pairs, named):
        sampler = few_shot.EpisodeSampler.from_dataset(examples, **options)
        assert same(sampler.episode(0), make_sampler(**options).episode(0))


def test_equal_episodes_have_equal_fingerprints():
    changes = [{}, {"seed": 1}, {"ways": 2}, {"shots": 2}, {"queries": 1}, {"scale": None}]
    changes += [{"images": IMAGES.view("int32"), "scale": None}, {"labels": LABELS + 1}]
    changes += [{"images": IMAGES + 1}]
    found = [make_sampler(**each).fingerprint for each in changes]
    assert len(set(found)) == len(changes)
    again = make_sampler(IMAGES.copy(order="F"), list(LABELS))
    assert found[0] == again.fingerprint and len(again.fingerprint) == 16


def test_text_stays_as_it_is():
    texts = [f"text {number}" for number in range(len(LABELS))]
    samplers = [make_sampler([*each]) for each in (texts, np.array(texts, object))]
    assert samplers[0].fingerprint == samplers[1].fingerprint
    assert samplers[0].fingerprint != make_sampler(texts[::-1]).fingerprint
    assert set(samplers[0].episode(0).support_images) <= set(texts)


def with_few_bees(queries):
    """A sampler whose class "bee" has four images."""
    names = np.array(["cat"] * (len(IMAGES) - 4) + ["bee"] * 4)
    return make_sampler(labels=names, ways=2, queries=queries)


def test_images_that_are_just_enough():
    with_few_bees(3)


def from_dataset(*examples):
    return few_shot.EpisodeSampler.from_dataset(examples)


PICTURE = np.zeros((4, 2, 3))
WITH_NAN = np.where(np.arange(336).reshape(IMAGES.shape) == 14, np.nan, IMAGES)


test_errors = refusing(
    (lambda: make_sampler(ways=8), r"`ways` must be at most .*, 7\. .*ways=8"),
    (lambda: make_sampler(ways=0), "`ways` must be a positive integer.*ways=0"),
    (lambda: make_sampler(queries=1.5), "`queries` must be a positive .*queries=1.5"),
    (lambda: make_sampler(scale=0), "`scale` must be a finite number above .*scale=0"),
    (lambda: make_sampler(["text"] * 84, scale=0.5), "`scale` must be None for text"),
    (lambda: make_sampler([object()] * 84), "`images` must be numbers or text"),
    (lambda: make_sampler(seed=-1), "`seed` must be an integer of at least 0.*seed=-1"),
    (lambda: with_few_bees(4), r"= 1 \+ 4 examples\. Received: .*4 examples of 'bee'"),
    (lambda: make_sampler(IMAGES[1:]), r"`len\(labels\)` must be 83, .*=84"),
    (lambda: make_sampler(WITH_NAN), r"`images` must be finite.*\(3, 1, 0, 0\)"),
    (lambda: make_sampler(IMAGES[:, :0]), r"`images` must be of shape.*\(84, 0, 2, 1\)"),
    (lambda: make_sampler(labels=np.zeros(84)), "`labels` must be class numbers or"),
    (lambda: make_sampler(labels=np.zeros((2, 42), int)), "`labels` must be class"),
    (lambda: make_sampler().batches(0, 1), "`batch_size` must be"),
    (lambda: make_sampler().batches(1, 1, start=-1), "`start` must be"),
    (lambda: from_dataset((np.zeros((8, 4, 2, 3)), np.zeros(8, int))), "`labels` must"),
    (lambda: from_dataset(*[(PICTURE, np.eye(3, dtype=int)[0])] * 2), "`labels` must"),
    (lambda: from_dataset((PICTURE, 0), (PICTURE[1:], 0)), "must have the same shape"),
)


OF_TWENTY = np.repeat(np.arange(10, 30), 3)


def test_sizes_of_splits():
    for sizes, expected in (
        ((12, 5, 3), [12, 5, 3]),
        (np.array([0.6, 0.25, 0.15]), [12, 5, 3]),
    ):
        parts = few_shot.split_classes(OF_TWENTY, sizes, seed=4)
        assert [len(part) for part in parts] == expected
        assert sorted(np.concatenate(parts)) == list(range(10, 30))
        assert all((np.diff(part) > 0).all() for part in parts)
    for classes in range(3, 40):  # Rounding loses no class.
        parts = few_shot.split_classes(range(classes), (1 / 3, 1 / 3, 1 / 3))
        assert sum(map(len, parts)) == classes
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def split(sizes, seed=1, classes=OF_TWENTY):
    return few_shot.split_classes(classes, sizes, seed=seed)


def test_the_seed_decides():
    one, again, other = (split((10, 10), seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    # Neither the order of the images nor their number counts.
    assert np.array_equal(one, split((10, 10), classes=range(29, 9, -1))[0])


test_errors_of_splits = refusing(
    (lambda: split(()), r"`sizes` must be integers that add up to 20"),
    (lambda: split((10, 9)), r"\(the classes\).*Received: sizes=\(10, 9\)"),
    (lambda: split((0.5, 0.4)), r"fractions that add up to 1.* Received: sizes=\(0.5, 0.4"),
    (lambda: split((0.99, 0.01)), r"with a class in every set"),
    (lambda: split((10, 10), None), "`seed` must be an integer of at least 0"),
)


def test_select_classes():
    images = np.arange(6, dtype="uint8").reshape(6, 1, 1, 1)
    names = ["b", "a", "c", "a", "b", "c"]
    chosen, labels = few_shot.select_classes(images, np.array(names, object), ["c", "a"])
    assert chosen.ravel().tolist() == [1, 2, 3, 5]
    assert labels.tolist() == ["a", "c", "a", "c"]
    with refused(r"`classes` must be among.*Received.*\['d', 'e'\]"):
        few_shot.select_classes(images, names, ["a", "e", "d"])
