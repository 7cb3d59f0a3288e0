"""Finetuning by batches, from a classifier that each episode draws for itself."""

import math
import zlib
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras.few_shot import Finetuner

#: Kernel and bias uniform in ±1 / sqrt(features), as PyTorch's `nn.Linear`.
TORCH_LINEAR = "torch_linear"


class BatchFinetuner(Finetuner):
    """The recipe of CloserLookFewShot's code: 100 epochs in batches of 4.

    A Closer Look at Few-shot Classification (Chen et al., ICLR 2019), Section 3.2, and
    `methods/baselinefinetune.py` of https://github.com/wyharveychen/CloserLookFewShot; the
    same rule and number of epochs in Appendix A of Neural Similarity Learning.

    Each pass draws a new order; a `batch_size` of `None` takes the whole set in each step.
    `start` is `"torch_linear"`, or a Keras initializer of the kernel, with biases at zero.
    Draws depend on `seed` and the episode's support examples, not on its place in a batch.
    """

    def __init__(
        self,
        model: keras.Model,
        ways: int,
        variables: Any = "classifier",
        epochs: int = 100,
        batch_size: int | None = 4,
        start: str = TORCH_LINEAR,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(model, ways, variables, **options)
        self.epochs, self.batch_size = epochs, batch_size
        self.start, self.seed = start, seed
        classifier = self._copy.layers[-1]
        self._drawn = [classifier.kernel, classifier.bias]

    def _draws(self, support_images: np.ndarray) -> list[np.ndarray]:
        """Returns the starts of kernel and bias, and the places of each step's examples.

        Places are of shape `(episodes, steps, batch size)`, -1 where a batch is smaller.
        """
        count = support_images.shape[1]
        drawn = []
        for images in support_images:
            digest = zlib.crc32(np.ascontiguousarray(images, "float32").tobytes())
            of_starts, of_batches = np.random.default_rng([self.seed, digest]).spawn(2)
            starts = self._starts(of_starts)
            size = min(self.batch_size or count, count)
            drawn.append([*starts, self._batches(count, size, of_batches)])
        return [np.stack(each) for each in zip(*drawn, strict=True)]

    def _starts(self, generator: np.random.Generator) -> list[np.ndarray]:
        kernel, bias = self._drawn
        if self.start == TORCH_LINEAR:
            limit = 1 / math.sqrt(kernel.shape[0])
            return [
                generator.uniform(-limit, limit, each.shape).astype(each.dtype)
                for each in self._drawn
            ]
        initializer = keras.initializers.get(self.start)
        initializer.seed = int(generator.integers(2**31))
        start = ops.convert_to_numpy(initializer(kernel.shape, kernel.dtype))
        return [start, np.zeros(bias.shape, bias.dtype)]

    def _batches(
        self, images: int, size: int, generator: np.random.Generator
    ) -> np.ndarray:
        of_pass = math.ceil(images / size)
        places = np.full((self.epochs, of_pass * size), -1, "int32")
        in_order = np.tile(np.arange(images, dtype="int32"), (self.epochs, 1))
        if size < images:
            in_order = generator.permuted(in_order, axis=1)
        places[:, :images] = in_order
        return places.reshape(-1, size)

    def __call__(self, episodes: Any) -> np.ndarray:
        self._drawn_now = self._draws(np.asarray(episodes[0]))
        return super().__call__(episodes)

    def _values(self) -> list[Any]:
        return [*super()._values(), *map(ops.convert_to_tensor, self._drawn_now)]

    def _scores(self, values: Any, support: Any, labels: Any, queries: Any) -> Any:
        """Returns queries' logits; the draws go along with the labels."""
        count = len(self._variables)
        labels = [labels, *values[count:]]
        return super()._scores(values[:count], support, labels, queries)

    def _adapt(self, images: Any, labels: np.ndarray, classes: Any) -> Any:
        self._drawn_now = []
        drawn = [each[0] for each in self._draws(images[None])]
        return super()._adapt(images, [labels, *drawn], classes)

    def _values_after(self, support: Any, labels: Any) -> list[Any]:
        labels, *starts, batches = map(ops.convert_to_tensor, labels)
        own = dict(zip(map(id, self._drawn), starts, strict=True))
        pairs = zip(self._after.variables, self._after.values(), strict=True)
        values = [own.get(id(variable), value) for variable, value in pairs]

        def loss(values: list[Any], index: Any) -> Any:
            places = ops.take(batches, index, axis=0)
            images, targets = (
                ops.take(each, ops.maximum(places, 0), axis=0) for each in (support, labels)
            )
            losses = self._losses(values, images, targets)
            shares = ops.cast(places >= 0, losses.dtype)
            return ops.sum(shares * losses) / ops.sum(shares)

        return self._descend(values, loss, ops.shape(batches)[0])
