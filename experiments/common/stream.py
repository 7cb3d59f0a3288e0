"""Image sets too large for the memory, ImageNet above all, read with tensorflow-datasets.

Training images are scaled so that the shorter side has 256/224 of the wanted pixels, then
cropped and mirrored at random; for evaluation the middle is cropped. Sets that were made
of the wanted size before are augmented as the recipe says. What is evaluated are the
validation images, as in the papers. Needs TensorFlow, on either Keras backend.
"""

import dataclasses
from typing import Any

import numpy as np

from experiments.common.recipe import Batches, augmented


@dataclasses.dataclass(frozen=True)
class ImageStream:
    """A prepared data set: its tfds builder, and the pixels of the images made of it.

    An `image_size` of `None` takes images as they are, all of one size.
    """

    builder: Any
    image_size: int | None

    @property
    def class_names(self) -> list[str]:
        return list(self.builder.info.features["label"].names)

    @property
    def image_shape(self) -> tuple[int, ...]:
        shape = self.builder.info.features["image"].shape
        return shape if self.image_size is None else (*[self.image_size] * 2, shape[-1])

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of images for training and evaluation; none are held out."""
        splits = self.builder.info.splits
        train, test = (splits[part].num_examples for part in ("train", "validation"))
        return {"train_examples": train, "validation_examples": 0, "test_examples": test}

    #: Prepared sets are known by their names.
    fingerprint = None

    def batches(self, split: str, batch_size: int, seed: int | None = None) -> Any:
        """A tf.data set of a split; by a seed in random order, without end."""
        import tensorflow as tf
        import tensorflow_datasets as tfds

        data = self.builder.as_dataset(
            split=split,
            shuffle_files=seed is not None,
            read_config=tfds.ReadConfig(shuffle_seed=seed),
        )
        if seed is not None:
            # The order is that of a large buffer: of shards and within them.
            data = data.shuffle(16 * batch_size, seed=seed).repeat()
        data = data.enumerate().map(
            lambda number, example: self._example(example, number, seed),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        return data.batch(batch_size).prefetch(tf.data.AUTOTUNE)

    def _example(self, example: dict[str, Any], number: Any, seed: int | None) -> Any:
        """Image in [0, 1] and label; cropped and mirrored at random, if there is a seed."""
        import tensorflow as tf

        image = tf.cast(example["image"], "float32") / 255
        if self.image_size is None:
            return image, example["label"]
        shape = tf.cast(tf.shape(image)[:2], "float32")
        shorter = float(round(self.image_size * 256 / 224))
        scaled = tf.cast(tf.round(shape * shorter / tf.reduce_min(shape)), "int32")
        image = tf.image.resize(image, scaled, antialias=True)
        wanted = self.image_shape
        if seed is None:
            top = (scaled - self.image_size) // 2
            image = image[top[0] : top[0] + wanted[0], top[1] : top[1] + wanted[1]]
            image = tf.ensure_shape(image, wanted)
        else:
            drawn = tf.stack([tf.cast(seed, tf.int64), number])
            image = tf.image.stateless_random_crop(image, wanted, drawn)
            image = tf.image.stateless_random_flip_left_right(image, drawn + 1)
        return tf.clip_by_value(image, 0.0, 1.0), example["label"]


class StreamedBatches(Batches):
    """Random batches of a stream, which is the `split`.

    The seed and the number of a chunk determine its order: a resumed
    run sees the images of an uninterrupted one.
    """

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if index == 0:
            generator = np.random.default_rng([self.seed, self.epoch * self.chunk])
            seed = int(generator.integers(2**31))
            batches = self.split.batches("train", self.recipe.batch_size, seed)
            self._batches = batches.as_numpy_iterator()
        images, labels = next(self._batches)
        if self.split.image_size is None:
            generator = np.random.default_rng([self.seed, 1, self.epoch, index])
            images = augmented(images, self.recipe.augmentation, generator)
        return images, labels
