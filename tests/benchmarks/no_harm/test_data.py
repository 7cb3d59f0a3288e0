"""Training images drawn for a seed, and real sets where there are copies."""

import os

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

from benchmarks.no_harm import data
from examples.common.data import Split

DATA = os.environ.get("NSL_KERAS_DATA_DIR")


def test_draws_are_balanced_and_a_function_of_the_seed():
    labels = np.repeat(np.arange(3), [50, 70, 90])
    split = Split(np.arange(210.0)[:, None], labels)
    drawn = data.draw(split, 60, seed=1)
    assert np.bincount(drawn.labels).tolist() == [20, 20, 20]
    assert len(np.unique(drawn.images)) == 60
    np.testing.assert_array_equal(labels[drawn.images[:, 0].astype(int)], drawn.labels)
    np.testing.assert_array_equal(data.draw(split, 60, seed=1).images, drawn.images)
    assert set(data.draw(split, 60, seed=2).images[:, 0]) != set(drawn.images[:, 0])
    # The first images are of all classes.
    assert set(drawn.labels[:20]) == {0, 1, 2}


def test_all_images_are_drawn_in_random_order():
    split = Split(np.arange(30.0)[:, None], np.repeat(np.arange(3), 10))
    drawn = data.draw(split, None, seed=0)
    assert sorted(drawn.images[:, 0]) == list(range(30))
    assert drawn.labels.tolist() != sorted(drawn.labels)


def check(images, train, test, shape, classes):
    for split, count in ((images.train, train), (images.test, test)):
        assert split.images.shape == (count, *shape)
        assert split.images.dtype == "float32"
        assert 0 <= split.images.min() < split.images.max() <= 1
        assert set(split.labels) == set(range(classes)) and images.classes == classes


def test_digits():
    images = data.DATASETS["digits"].load(0)
    check(images, 1257, 540, (8, 8, 1), 10)
    other = data.DATASETS["digits"].load(1)
    np.testing.assert_array_equal(other.test.images, images.test.images)
    assert (other.train.labels != images.train.labels).any()


@pytest.mark.data
@pytest.mark.skipif(DATA is None, reason="NSL_KERAS_DATA_DIR is not set")
@pytest.mark.parametrize(
    ("name", "train", "test", "shape", "classes"),
    [
        ("omniglot_50", 750, 250, (28, 28, 1), 50),
        ("cifar10_1000", 1000, 2000, (32, 32, 3), 10),
        ("mnist_6000", 6000, 2000, (28, 28, 1), 10),
        ("cifar10_10000", 10_000, 2000, (32, 32, 3), 10),
    ],
)
def test_prepared_sets(name, train, test, shape, classes):
    images = data.DATASETS[name].load(0, DATA)
    check(images, train, test, shape, classes)
    assert len(set(np.bincount(images.train.labels))) == 1
