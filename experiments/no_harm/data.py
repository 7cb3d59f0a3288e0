"""Small image sets: training images drawn for a seed, test images that are always the same.

Training images of MNIST and CIFAR-10 are drawn from the first 20,000 of the set, in equal
shares of the classes; at most 2,000 of the test images are used, to save time. Digits and
Omniglot use all their training images with every seed.
"""

import functools
from typing import NamedTuple

import numpy as np

from experiments.common import data
from experiments.common.data import Split

POOL = 20_000
TEST_IMAGES = 2_000
OMNIGLOT = "omniglot"
OMNIGLOT_CLASSES = 50
#: Of the 20 images of a class.
OMNIGLOT_TRAINING = 15
OMNIGLOT_SIZE = 28


class Images(NamedTuple):
    """Training and test images, in [0, 1], and the number of classes."""

    train: Split
    test: Split
    classes: int


class Dataset(NamedTuple):
    """An image set of the matrix; `source` is what `experiments.common.data` calls it."""

    title: str
    source: str
    #: How many are drawn; `None` is all of them.
    training_images: int | None = None

    def load(self, seed: int, data_dir: str | None = None) -> Images:
        train, test, classes = _read(self.source, data_dir)
        return Images(draw(train, self.training_images, seed), test, classes)


#: The cheapest come first.
DATASETS = {
    "digits": Dataset("digits", "digits"),
    "omniglot_50": Dataset("Omniglot (50 classes)", OMNIGLOT),
    "cifar10_1000": Dataset("CIFAR-10 (1,000)", "cifar10", 1_000),
    "mnist_6000": Dataset("MNIST (6,000)", "mnist", 6_000),
    "cifar10_10000": Dataset("CIFAR-10 (10,000)", "cifar10", 10_000),
}


def draw(split: Split, count: int | None, seed: int) -> Split:
    """Returns examples in random order, as many of each class; all of them for `None`."""
    generator = np.random.default_rng(seed)
    chosen = generator.permutation(len(split.labels))
    if count is not None:
        classes = np.unique(split.labels)
        share = count // len(classes)
        parts = [chosen[split.labels[chosen] == each][:share] for each in classes]
        chosen = generator.permutation(np.concatenate(parts))
    return Split(split.images[chosen], split.labels[chosen])


@functools.cache
def _read(source: str, data_dir: str | None) -> Images:
    if source == OMNIGLOT:
        return _omniglot(data_dir)
    found = data.load(source, data_dir, train_examples=None if source == "digits" else POOL)
    if source == "digits":
        found = data.without_validation(found)
    test = found.test
    if len(test.labels) > TEST_IMAGES:
        test = draw(test, TEST_IMAGES, seed=0)
    return Images(found.train, test, len(found.class_names))


def _omniglot(data_dir: str | None) -> Images:
    """Classes of the part `small1`, bright strokes on black."""
    builder = data.prepared_builder("omniglot", data_dir)
    found = data.read_prepared(builder, "small1", channels=1)
    classes = np.random.default_rng(0).permutation(np.unique(found.labels))
    classes = classes[:OMNIGLOT_CLASSES]
    members = np.stack([np.flatnonzero(found.labels == each) for each in classes])

    def part(indices: np.ndarray) -> Split:
        strokes = 255 - found.images[indices.ravel()]
        images = np.clip(data.resized_images(strokes, OMNIGLOT_SIZE) / 255, 0, 1)
        return Split(images, np.repeat(np.arange(len(indices)), len(indices.T)))

    parts = np.split(members, [OMNIGLOT_TRAINING], axis=1)
    return Images(*map(part, parts), len(classes))
