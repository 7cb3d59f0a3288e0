"""Few-shot tasks drawn from labeled examples, whose classes can be split."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from nsl_keras import validation
from nsl_keras.training.data import array_of, with_text


class Episode(NamedTuple):
    """One few-shot task, or a batch of them, in which each array has an extra leading axis.

    Examples are ordered by class. Classes are renumbered from 0 in each episode.

    Attributes:
        support_images: Array `(ways * shots, ...)` of examples to adapt to.
        support_labels: int32 array `(ways * shots,)` of classes 0 to `ways - 1`.
        query_images: Array `(ways * queries, ...)` of examples to classify.
        query_labels: int32 array `(ways * queries,)`.

    Example:

    >>> import numpy as np
    >>> from nsl_keras import few_shot
    >>> sampler = few_shot.EpisodeSampler(np.zeros((60, 9)), np.arange(60) // 10, queries=1)
    >>> sampler.episode(0).query_labels.tolist()
    [0, 1, 2, 3, 4]
    """

    support_images: np.ndarray
    support_labels: np.ndarray
    query_images: np.ndarray
    query_labels: np.ndarray


class EpisodeSampler:
    """Draws episodes: some classes, with support and query examples of each class.

    An episode contains `ways` different classes, drawn uniformly, and `shots + queries`
    different examples per class. Episode `i` depends on `seed` and `i` alone, so that
    several methods can be compared on the same episodes.

    Args:
        images: Array of shape `(n, ...)`: images, vectors, signals, token IDs or text.
        labels: Array of shape `(n,)` or `(n, 1)`: class numbers or names. Pass one part of
            the classes only (see `split_classes` and `select_classes`).
        ways: int, the number of classes in an episode.
        shots: int, the number of support examples per class.
        queries: int, the number of query examples per class.
        seed: int, at least 0.
        scale: float above 0 that multiplies examples, which become float32: `1 / 255` turns
            bytes into [0, 1]. `None` keeps them as they are, for example integer token IDs.
            Text always stays as it is.

    Raises:
        ValueError: If there are fewer classes than `ways`, a class has fewer examples than
            `shots + queries`, or examples are not finite or not as many as labels.

    Example:

    >>> import numpy as np
    >>> from nsl_keras import few_shot
    >>> images = np.random.default_rng(0).integers(0, 256, (100, 8, 8, 3), "uint8")
    >>> sampler = few_shot.EpisodeSampler(images, np.arange(100) // 10, shots=2, queries=3)
    >>> batch = sampler.episodes(4)
    >>> batch.support_images.shape, batch.query_labels.shape
    ((4, 10, 8, 8, 3), (4, 15))

    Reference:
        Matching Networks for One Shot Learning (Vinyals et al., NeurIPS 2016).
    """

    def __init__(
        self,
        images: Any,
        labels: Any,
        ways: int = 5,
        shots: int = 1,
        queries: int = 15,
        seed: int = 0,
        scale: float | None = 1.0,
    ) -> None:
        self.images, self.labels = checked_examples(images, labels)
        self.ways = validation.positive_integer(ways, "ways")
        self.shots = validation.positive_integer(shots, "shots")
        self.queries = validation.positive_integer(queries, "queries")
        self.seed = validation.non_negative_integer(seed, "seed")
        self.scale = validation.optional(validation.positive_number, scale, "scale")
        if self.images.dtype.kind in "SU":
            validation.require(scale in (None, 1.0), "scale", "None for text", scale)
            self.scale = None
        self.classes, numbers, counts = np.unique(
            self.labels, return_inverse=True, return_counts=True
        )
        demand = f"at most the number of classes, {len(self.classes)}"
        validation.require(self.ways <= len(self.classes), "ways", demand, self.ways)
        rarest = counts.argmin()
        enough = counts[rarest] >= self.shots + self.queries
        demand = f"of classes with at least shots + queries = {shots} + {queries} examples"
        received = f"{counts[rarest]} examples of {self.classes[rarest].item()!r}"
        validation.require(enough, "labels", demand, received)
        order = np.argsort(numbers, kind="stable")
        self._images_of = np.split(order, np.cumsum(counts)[:-1])

    @functools.cached_property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits, equal for samplers of equal episodes."""
        setting = (self.ways, self.shots, self.queries, self.seed, self.scale)
        dtype = self.images.dtype.str
        described = (setting, self.labels.tolist(), self.images.shape, dtype)
        digest = hashlib.sha256(repr(described).encode())
        digest.update(np.ascontiguousarray(self.images).data)
        return digest.hexdigest()[:16]

    @classmethod
    def from_dataset(cls, dataset: Iterable[Any], **options: Any) -> EpisodeSampler:
        """Reads a data set of single examples once, for example of tensorflow-datasets.

        Args:
            dataset: Iterable of `{"image": ..., "label": ...}` or of `(image, label)`, with
                images of one size.
            **options: Further arguments of `EpisodeSampler`.
        """
        pairs = [
            (example["image"], example["label"]) if isinstance(example, dict) else example
            for example in dataset
        ]
        images, labels = (np.stack(each) for each in zip(*pairs, strict=True))
        return cls(images, labels, **options)

    def episode(self, index: int) -> Episode:
        """Returns episode `index`, which depends on `index` and `seed` alone."""
        return Episode(*(array[0] for array in self.episodes(1, index)))

    def episodes(self, count: int, start: int = 0) -> Episode:
        """Returns a batch of the episodes `start` to `start + count - 1`, all in memory."""
        count = validation.positive_integer(count, "count")
        start = validation.non_negative_integer(start, "start")
        drawn = np.stack([self._draw(start + i) for i in range(count)])
        support, query = np.split(drawn, [self.shots], axis=2)
        return Episode(
            *self._gather(support.reshape(count, -1), self.shots),
            *self._gather(query.reshape(count, -1), self.queries),
        )

    def _draw(self, index: int) -> np.ndarray:
        """Returns the indices of an episode's examples, `(ways, shots + queries)`."""
        generator = np.random.default_rng((self.seed, index))
        classes = generator.choice(len(self.classes), self.ways, replace=False)
        pools = [self._images_of[each] for each in classes]
        size = self.shots + self.queries
        return np.stack([generator.choice(pool, size, replace=False) for pool in pools])

    def _gather(self, drawn: np.ndarray, per_class: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.repeat(np.arange(self.ways, dtype="int32"), per_class)
        labels = np.tile(labels, (len(drawn), 1))
        if self.scale is None:
            return self.images[drawn], labels
        images = self.images[drawn].astype("float32")
        images *= np.float32(self.scale)
        return images, labels

    def batches(self, batch_size: int, steps: int, start: int = 0) -> keras.utils.PyDataset:
        """Returns batches of episodes for `fit`, `evaluate` and `predict`.

        Batch `i` of epoch `e`, both from 0, is `((support_images, support_labels,
        query_images), query_labels)` of the episodes from `start + (e * steps + i) *
        batch_size` on. Do not pass `steps_per_epoch` to `fit`, because an epoch counts only
        when all its batches have been taken.

        Args:
            batch_size: int, the number of episodes in a batch.
            steps: int, the number of batches in an epoch.
            start: int, the first episode: `e * steps * batch_size` after `e` epochs.
        """
        return _EpisodeBatches(self, batch_size, steps, start)


class _EpisodeBatches(keras.utils.PyDataset):
    """See `EpisodeSampler.batches`."""

    def __init__(
        self, sampler: EpisodeSampler, batch_size: int, steps: int, start: int
    ) -> None:
        super().__init__()
        self.sampler = sampler
        self.batch_size = validation.positive_integer(batch_size, "batch_size")
        self.steps = validation.positive_integer(steps, "steps")
        self.start = validation.non_negative_integer(start, "start")
        self.epoch = 0
        # Whether an epoch has begun, and the batches taken since the last one ended.
        self._begun = False
        self._taken: set[int] = set()

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> tuple[Any, np.ndarray]:
        self._taken.add(index)
        number = self.epoch * self.steps + index
        start = self.start + number * self.batch_size
        episodes = self.sampler.episodes(self.batch_size, start)
        return (*map(with_text, episodes[:3]),), episodes.query_labels

    def on_epoch_begin(self) -> None:
        self._begun = True  # Not more: workers draw already.

    def on_epoch_end(self) -> None:
        # Keras also calls this after peeking at batches to build the model; how often
        # depends on the backend. Processes draw from copies, which nobody can count.
        whole = self.use_multiprocessing or len(self._taken) == self.steps
        if self._begun and whole:
            self.epoch += 1
        self._begun, self._taken = False, set()


def split_classes(
    labels: Any, sizes: Sequence[int] | Sequence[float], seed: int = 0
) -> list[np.ndarray]:
    """Splits classes at random into disjoint, sorted arrays, to evaluate on unseen classes.

    Args:
        labels: Array of shape `(n,)`, class numbers or names.
        sizes: The sizes of the sets: ints that add up to the number of classes, or floats
            that add up to 1.
        seed: int, fixes the draw.

    Raises:
        ValueError: If the sizes do not add up, or leave a set without classes.

    Example:

    >>> from nsl_keras import few_shot
    >>> train, test = few_shot.split_classes(["cat", "cow", "dog", "dog", "owl"], (3, 1))
    >>> len(train), len(test), len({*train} & {*test})
    (3, 1, 0)
    """
    classes = np.unique(as_classes(labels))
    if all(isinstance(size, (int, np.integer)) for size in sizes):
        counts = list(sizes)
    else:
        ends = np.round(np.cumsum(sizes) * len(classes)).astype(int)
        counts = np.diff([0, *ends]).tolist() if np.isclose(np.sum(sizes), 1) else []
    demand = (
        f"integers that add up to {len(classes)} (the classes), or fractions that add up "
        "to 1, with a class in every set"
    )
    add_up = min(counts, default=0) > 0 and sum(counts) == len(classes)
    validation.require(add_up, "sizes", demand, tuple(sizes))
    seed = validation.non_negative_integer(seed, "seed")
    shuffled = np.random.default_rng(seed).permutation(classes)
    return [np.sort(part) for part in np.split(shuffled, np.cumsum(counts)[:-1])]


def select_classes(images: Any, labels: Any, classes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the `(images, labels)` of some classes, in the same order.

    Args:
        images: Array of shape `(n, ...)`, images or other examples.
        labels: Array of shape `(n,)`, class numbers or names.
        classes: Array of classes, as `split_classes` returns them.

    Raises:
        ValueError: If a class has no example, or for bad examples or labels.

    Example:

    >>> import numpy as np
    >>> from nsl_keras import few_shot
    >>> images = np.zeros((4, 8, 8, 3), "uint8")
    >>> some, labels = few_shot.select_classes(images, [7, 8, 9, 8], [8, 9])
    >>> some.shape, labels.tolist()
    ((3, 8, 8, 3), [8, 9, 8])
    """
    images, labels = checked_examples(images, labels)
    classes = np.unique(as_classes(classes, "classes"))
    absent = classes[~np.isin(classes, labels)].tolist()
    validation.require(not absent, "classes", "among the labels", absent)
    chosen = np.isin(labels, classes)
    return images[chosen], labels[chosen]


def checked_examples(images: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns examples and their classes as arrays; arrays are not copied."""
    images = _without_objects(array_of(images))
    demand = "numbers or text, not objects of other types"
    validation.require(images.dtype != object, "images", demand, images.dtype)
    demand = "of shape (n, ...), for example (n, height, width, channels), with no size 0"
    validation.require(images.ndim > 0 and images.size > 0, "images", demand, images.shape)
    validation.require_finite(images, "images")
    labels = as_classes(labels)
    validation.require_one_per_example(labels, len(images))
    return images, labels


def as_classes(labels: Any, name: str = "labels") -> np.ndarray:
    """Returns classes, integers or strings, as an array of rank 1."""
    values = _without_objects(array_of(labels))
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    are_classes = values.ndim == 1 and values.dtype.kind in "iuU"
    demand = "class numbers or names (integers or strings), of shape (n,) or (n, 1)"
    validation.require(are_classes, name, demand, (values.dtype, values.shape))
    return values


def _without_objects(array: np.ndarray) -> np.ndarray:
    """Returns text as NumPy's strings; pandas and TensorFlow hold it as objects."""
    if array.dtype == object and all(isinstance(each, str) for each in array.flat):
        return array.astype(str)
    return array
