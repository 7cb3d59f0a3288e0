"""Few-shot tasks drawn from labelled images: N ways, K shots, some queries."""

from __future__ import annotations

import functools
import hashlib
import math
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import numpy as np

from nsl_keras import validation
from nsl_keras.backend import endless_dataset
from nsl_keras.data import known_length
from nsl_keras.few_shot.classes import checked_images, listed
from nsl_keras.progress import Progress

#: A batch of more would not fit into any memory, nor end in any time.
MOST_EPISODES = 1_000_000

#: Standardized images do not reach so far.
_SURELY_BYTES = 100

#: What `fit` takes: what a learner sees of an episode, and what it is asked.
Batch = tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class Episode(NamedTuple):
    """One few-shot task, or a batch of them with one more leading axis on each array.

    Images and labels stand class by class, the classes numbered anew in every episode.

    Attributes:
        support_images: float32 array `(ways * shots, height, width, channels)`, to adapt
            to.
        support_labels: int32 array `(ways * shots,)` of classes 0 to `ways - 1`.
        query_images: float32 array `(ways * queries, height, width, channels)`, to judge
            the adapted model on.
        query_labels: int32 array `(ways * queries,)`.

    Example:

    >>> import numpy as np
    >>> from nsl_keras import few_shot
    >>> sampler = few_shot.EpisodeSampler(
    ...     np.zeros((60, 8, 8, 1)), np.arange(60) // 10, ways=5, shots=1, queries=2)
    >>> episode = sampler.episode(0)
    >>> episode.support_labels.tolist(), episode.query_labels.tolist()
    ([0, 1, 2, 3, 4], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    """

    support_images: np.ndarray
    support_labels: np.ndarray
    query_images: np.ndarray
    query_labels: np.ndarray


class EpisodeSampler:
    """Draws episodes: some classes, and of each some support and some query images.

    For each episode `ways` different classes are drawn with equal chances, and of each
    class `shots + queries` different images. Episode number `i` is a function of `seed` and
    `i` alone, so that several methods can be compared on the same episodes, in any order
    and on either backend. The papers' protocol for tests: 15 queries, 600 episodes.

    The images stay in memory as they are given, uint8 in a quarter of float32's memory.
    Episodes hold float32: uint8 images divided by 255, in [0, 1]; floating-point images
    with their values unchanged.

    Args:
        images: Array of shape `(n, height, width, channels)`, uint8 or floating-point.
        labels: Array of shape `(n,)` or `(n, 1)`: the class of each image, a number or a
            name. All classes count as one pool: give only the part's own (see
            `split_classes`, `select_classes` and `disjoint`).
        ways: int, the number of classes in an episode.
        shots: int, the number of support images of a class.
        queries: int, the number of query images of a class.
        seed: int, at least 0.

    Warns:
        UserWarning: If floating-point images look like those of [0, 255].

    Raises:
        ValueError: If there are fewer classes than `ways`, or in some class (named) fewer
            images than `shots + queries`; if the images are not finite, or their number is
            not that of the labels.

    Example:

    >>> import numpy as np
    >>> from nsl_keras import few_shot
    >>> images = np.random.default_rng(0).integers(0, 256, (100, 8, 8, 3), "uint8")
    >>> sampler = few_shot.EpisodeSampler(images, np.arange(100) // 10, shots=2, queries=3)
    >>> batch = sampler.episodes(4)
    >>> batch.support_images.shape, batch.query_labels.shape
    ((4, 10, 8, 8, 3), (4, 15))

    Reference:
        Vinyals et al., Matching Networks for One Shot Learning (2016); Liu et al., Neural
        Similarity Learning (2019), Section 7.2.
    """

    def __init__(
        self,
        images: Any,
        labels: Any,
        ways: int = 5,
        shots: int = 1,
        queries: int = 15,
        seed: int = 0,
    ) -> None:
        self.images, self.labels = checked_images(images, labels)
        if self.images.dtype.kind == "f" and self.images.max(initial=0) > _SURELY_BYTES:
            warnings.warn(
                "Floating-point images are taken as they are, and uint8 ones divided by "
                f"255. These go up to {self.images.max():.0f}: divide them where the "
                "network expects [0, 1].",
                stacklevel=2,
            )
        self.ways = validation.positive_integer(ways, "ways")
        self.shots = validation.positive_integer(shots, "shots")
        self.queries = validation.positive_integer(queries, "queries")
        self.seed = validation.non_negative_integer(seed, "seed")
        self.classes, numbers, counts = np.unique(
            self.labels, return_inverse=True, return_counts=True
        )
        if self.ways > len(self.classes):
            raise ValueError(
                f"`ways` must be at most the number of classes, {len(self.classes)}. "
                f"Received: ways={self.ways} for the classes {listed(self.classes)}"
            )
        few = counts < self.shots + self.queries
        if few.any():
            raise ValueError(
                f"Every class must have at least shots + queries = {self.shots} + "
                f"{self.queries} images. Received: {listed(self.classes[few])} with "
                f"{counts[few].min()} at the fewest"
            )
        order = np.argsort(numbers, kind="stable")
        self._images_of = np.split(order, np.cumsum(counts)[:-1])

    @functools.cached_property
    def fingerprint(self) -> str:
        """Sixteen letters that are equal for samplers of equal episodes."""
        setting = (self.ways, self.shots, self.queries, self.seed, self.labels.tolist())
        digest = hashlib.sha256(repr((setting, self.images.shape)).encode())
        digest.update(np.ascontiguousarray(self.images).data)
        return digest.hexdigest()[:16]

    @classmethod
    def from_dataset(
        cls,
        dataset: Iterable[Any],
        ways: int = 5,
        shots: int = 1,
        queries: int = 15,
        seed: int = 0,
        verbose: Any = "auto",
    ) -> EpisodeSampler:
        """Reads a data set of single examples once, as tensorflow-datasets has them.

        Args:
            dataset: Iterable of `{"image": ..., "label": ...}` or of `(image, label)`: a
                `tf.data.Dataset` that ends, or what `tfds.as_numpy` or `tfds.data_source`
                return, not in batches. Images must be of one size (use the data set's
                `map` before); uint8 ones come out in [0, 1], as of the class.
            ways: As of the class.
            shots: As of the class.
            queries: As of the class.
            seed: As of the class.
            verbose: 0 for silence, 1 for a progress bar over examples, 2 for a line at
                the end; `"auto"` for a bar where it takes longer than two seconds.

        Raises:
            ValueError: As the class, and for examples of another form, without any, or
                of several sizes.

        Example:

        >>> import numpy as np
        >>> from nsl_keras import few_shot
        >>> examples = [{"image": np.zeros((8, 8, 1), "uint8"), "label": i % 6}
        ...             for i in range(60)]
        >>> sampler = few_shot.EpisodeSampler.from_dataset(examples, queries=2)
        >>> sampler.images.shape
        (60, 8, 8, 1)
        """
        images, labels = [], []
        count = known_length(dataset)
        if count == math.inf:
            raise ValueError(
                "`dataset` must end. Received: an endless " + type(dataset).__name__
            )
        for example in Progress(count, verbose).over(dataset):
            image, label = _image_and_label(example)
            images.append(image)
            labels.append(label)
        shapes = sorted({image.shape for image in images})
        if len(shapes) != 1:
            raise ValueError(
                "`dataset` must hold images of one size. Received: "
                + (f"sizes {shapes[0]} to {shapes[-1]}" if shapes else "no examples")
            )
        return cls(np.stack(images), labels, ways, shots, queries, seed)

    def episode(self, index: int) -> Episode:
        """Returns episode number `index`, a function of it and `seed` alone."""
        return Episode(*(array[0] for array in self.episodes(1, index)))

    def episodes(self, count: int, start: int = 0, verbose: Any = 0) -> Episode:
        """Returns a batch of episodes, `start` to `start + count - 1`.

        All are in memory at once as float32: 600 of 5 ways and 1 + 15 images of 84 x 84
        pixels are 4 GB. Take many of them in smaller batches.

        Args:
            count: int, the number of episodes.
            start: int, the number of the first.
            verbose: 0 for silence, 1 for a progress bar over episodes, 2 for a line at
                the end; `"auto"` for a bar where it takes longer than two seconds.

        Returns:
            An `Episode` whose arrays have the episodes as their first axis.

        Raises:
            ValueError: If `count` is not between 1 and 1,000,000, or `start` negative.
        """
        count = number_of_episodes(count, "count")
        start = validation.non_negative_integer(start, "start")
        drawn = np.stack([self._draw(start + i) for i in range(count)])
        support, query = np.split(drawn, [self.shots], axis=2)
        progress = Progress(2 * count, verbose)
        return Episode(
            *self._gather(support.reshape(count, -1), self.shots, progress),
            *self._gather(query.reshape(count, -1), self.queries, progress),
        )

    def _draw(self, index: int) -> np.ndarray:
        """Returns the numbers of an episode's images, `(ways, shots + queries)`."""
        generator = np.random.default_rng((self.seed, index))
        classes = generator.choice(len(self.classes), self.ways, replace=False)
        return np.stack(
            [
                generator.choice(
                    self._images_of[each], self.shots + self.queries, replace=False
                )
                for each in classes
            ]
        )

    def _gather(
        self, drawn: np.ndarray, per_class: int, progress: Progress
    ) -> tuple[np.ndarray, np.ndarray]:
        images = np.empty((*drawn.shape, *self.images.shape[1:]), "float32")
        white = np.float32(255 if self.images.dtype == np.uint8 else 1)
        # One at a time: a copy of all in between would take longer than the work.
        for episode, numbers in zip(images, drawn, strict=True):
            np.divide(self.images[numbers], white, out=episode, casting="same_kind")
            progress.advance()
        labels = np.repeat(np.arange(self.ways, dtype="int32"), per_class)
        return images, np.tile(labels, (len(drawn), 1))

    def _batch(self, number: int, size: int, start: int) -> Batch:
        episodes = self.episodes(size, start + number * size)
        return episodes[:3], episodes.query_labels

    def batches(
        self,
        batch_size: int,
        steps: int,
        start: int = 0,
        fresh: bool = True,
    ) -> keras.utils.PyDataset:
        """Returns batches of episodes for `fit`, `evaluate` and `predict`.

        Batch number `i` of epoch number `e` is
        `((support_images, support_labels, query_images), query_labels)` of the episodes
        from number `start + (e * steps + i) * batch_size`.

        Args:
            batch_size: int, the number of episodes in a batch.
            steps: int, the number of batches in an epoch.
            start: int, the number of the first episode. To go on with a training of `e`
                epochs, give `e * steps * batch_size`.
            fresh: bool, whether each epoch has new episodes, or, for validation, the same.
                An epoch is one in which all batches were taken: give `fit` no
                `steps_per_epoch`.

        Returns:
            A `keras.utils.PyDataset` of `steps` batches, for both backends.

        Raises:
            ValueError: If a number is not positive, `batch_size` more than 1,000,000, or
                `start` negative.
        """
        return _EpisodeBatches(self, batch_size, steps, start, fresh)

    def dataset(self, batch_size: int, start: int = 0) -> Any:
        """Returns the same batches as an infinite `tf.data.Dataset` (TensorFlow only).

        Give `fit` a number of `steps_per_epoch` and `shuffle=False`.

        Args:
            batch_size: int, the number of episodes in a batch.
            start: int, the number of the first episode.

        Returns:
            A `tf.data.Dataset` of `((support_images, support_labels, query_images),
            query_labels)`.

        Raises:
            ValueError: If `batch_size` is not between 1 and 1,000,000, or `start`
                negative.
            RuntimeError: On another backend than TensorFlow.
        """
        batch_size = number_of_episodes(batch_size, "batch_size")
        start = validation.non_negative_integer(start, "start")
        return endless_dataset(lambda number: self._batch(number, batch_size, start))


def filled_up(batch: Episode, size: int) -> Episode:
    """Returns a batch of so many episodes, copies of the last one where there are fewer."""
    count = len(batch.query_labels)
    if count == size:
        return batch
    kept = np.minimum(np.arange(size), count - 1)
    return Episode(*(each[kept] for each in batch))


def number_of_episodes(value: Any, name: str) -> int:
    """Returns `value` as an int of at least 1 and at most `MOST_EPISODES`."""
    return validation.positive_integer(value, name, MOST_EPISODES)


def _image_and_label(example: Any) -> tuple[np.ndarray, Any]:
    """Returns the parts of one example of a data set."""
    if isinstance(example, dict) and {"image", "label"} <= set(example):
        image, label = np.asarray(example["image"]), np.asarray(example["label"])
    elif isinstance(example, (tuple, list)) and len(example) == 2:
        image, label = map(np.asarray, example)
    else:
        found = sorted(example) if isinstance(example, dict) else type(example).__name__
        raise ValueError(
            "`dataset` must hold examples (image, label), or {'image': ..., 'label': ...}. "
            f"Received: an example of {found}"
        )
    if image.ndim != 3 or label.size != 1:
        raise ValueError(
            "`dataset` must hold single images of shape (height, width, channels), each "
            "with one class number or name: undo batches with `dataset.unbatch()`, and "
            f"one-hot labels by their argmax. Received: an image of shape {image.shape} "
            f"with a label of shape {label.shape}"
        )
    return image, label.item()


class _EpisodeBatches(keras.utils.PyDataset):
    """See `EpisodeSampler.batches`."""

    def __init__(
        self,
        sampler: EpisodeSampler,
        batch_size: int,
        steps: int,
        start: int,
        fresh: bool,
    ) -> None:
        super().__init__()
        self.sampler = sampler
        self.batch_size = number_of_episodes(batch_size, "batch_size")
        self.steps = validation.positive_integer(steps, "steps")
        self.start = validation.non_negative_integer(start, "start")
        self.fresh = validation.boolean(fresh, "fresh")
        self.epoch = 0
        # The batches of the running epoch that were asked for; None between epochs.
        self._taken: set[int] | None = None

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> Batch:
        if self._taken is not None:
            self._taken.add(index)
        number = self.epoch * self.steps + index
        return self.sampler._batch(number, self.batch_size, self.start)

    def on_epoch_begin(self) -> None:
        self._taken = set()

    def on_epoch_end(self) -> None:
        # Keras says so also after it looked at a batch or two to build the model, and
        # not equally often on both backends.
        if self.fresh and self._taken is not None and len(self._taken) == self.steps:
            self.epoch += 1
        self._taken = None
