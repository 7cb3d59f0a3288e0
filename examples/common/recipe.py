"""How networks are trained: rates, decay, batches, and runs that can be resumed.

Batches are NumPy arrays, a function of seed and step alone, so that a resumed run
sees what an uninterrupted one would have, on either backend.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any, Self

import keras
import numpy as np

import nsl_keras
from examples.common import data, runs

#: "crop": padded by 4 pixels of the mirror image, "pad_crop": by zeros; "cutout": a square
#: of 16x16 pixels is blackened.
AUGMENTATIONS = (
    "none",
    "flip",
    "crop_flip",
    "pad_crop",
    "pad_crop_flip",
    "pad_crop_flip_cutout",
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training, in steps. Shorter ones keep its proportions.

    Attributes:
        steps: Their number.
        rate_drops: Steps after which the rate is divided by 10.
        learning_rate: The rate at the start.
        batch_size: Images of a step.
        augmentation: One of `AUGMENTATIONS`.
        optimizer: `"momentum"`, `"nesterov"`, `"adam"` or `"adamw"`.
        epsilon: Adam's and AdamW's.
        weight_decay: AdamW's, as in Keras, which multiplies it with the rate.
        clip: Largest entry of a gradient.
        cosine_decay: Whether the rate falls to 0 along a cosine.
        penalty: Factor of half the squared weights in the loss.
        label_smoothing: Probability that is spread over all classes.
        input_range: What black and white, 0 and 1, are to the network.
    """

    steps: int
    rate_drops: tuple[int, ...] = ()
    learning_rate: float = 0.1
    batch_size: int = 128
    augmentation: str = "none"
    optimizer: str = "momentum"
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = None
    cosine_decay: bool = False
    penalty: float = 0.0
    label_smoothing: float = 0.0
    input_range: tuple[float, float] = (0.0, 1.0)

    def scaled(self, steps: int) -> Self:
        """The recipe with another number of steps, rate drops in proportion."""
        return dataclasses.replace(
            self,
            steps=steps,
            rate_drops=tuple(round(drop * steps / self.steps) for drop in self.rate_drops),
        )

    def rates(self) -> float | keras.optimizers.schedules.LearningRateSchedule:
        """The rate of each step."""
        schedules = keras.optimizers.schedules
        if self.cosine_decay:
            return schedules.CosineDecay(self.learning_rate, self.steps)
        if not self.rate_drops:
            return self.learning_rate
        return schedules.PiecewiseConstantDecay(
            list(self.rate_drops),
            [self.learning_rate / 10**drops for drops in range(len(self.rate_drops) + 1)],
        )

    def make_optimizer(self, spared: Sequence[Any] = ()) -> keras.optimizers.Optimizer:
        """The optimizer; AdamW does not decay the `spared` variables."""
        rates, clip = self.rates(), {"clipvalue": self.clip}
        if self.optimizer == "adam":
            return keras.optimizers.Adam(rates, epsilon=self.epsilon, **clip)
        if self.optimizer == "adamw":
            made = keras.optimizers.AdamW(
                rates, weight_decay=self.weight_decay, epsilon=self.epsilon, **clip
            )
            made.exclude_from_weight_decay(var_list=list(spared))
            return made
        nesterov = self.optimizer == "nesterov"
        return keras.optimizers.SGD(rates, momentum=0.9, nesterov=nesterov, **clip)

    def penalize(self, variables: Iterable[Any]) -> None:
        """Puts the penalty on variables that have none."""
        for variable in variables:
            if self.penalty and variable.regularizer is None:
                variable.regularizer = keras.regularizers.L2(self.penalty / 2)


def compile_classifier(
    model: keras.Model,
    recipe: Recipe,
    spared: Sequence[Any] = (),
    top_5: bool = False,
    jit_compile: bool | str = "auto",
) -> None:
    """Compiles a model that gives logits, for integer labels."""
    metrics: list = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    if top_5:
        metrics.append(keras.metrics.SparseTopKCategoricalAccuracy(5, name="top_5"))
    loss: keras.losses.Loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if recipe.label_smoothing:
        loss = nsl_keras.losses.SmoothedCrossentropy(recipe.label_smoothing)
    model.compile(
        optimizer=recipe.make_optimizer(spared),
        loss=loss,
        metrics=metrics,
        jit_compile=jit_compile,
    )
    # Now, so that a restored state finds its place.
    model.optimizer.build(model.trainable_variables)


def spared_of(model: keras.Model) -> list:
    """What weight decay spares, as the authors': the classifier, dictionary and rates."""
    if isinstance(model, nsl_keras.MetaNeighborhoodModel):
        return model.decay_exempt_variables
    return model.layers[-1].trainable_variables


def augmented(
    images: np.ndarray, augmentation: str, generator: np.random.Generator
) -> np.ndarray:
    """Images shifted by up to 4 pixels, mirrored and cut, each for itself.

    Shifted in images are continued by their mirror image, as in the authors' code of
    Neural Similarity Learning, or by zeros, as in that of Meta-Neighborhoods.
    """
    count, height, width, _ = images.shape
    if augmentation == "none":
        return images
    rows, columns = np.arange(height), np.arange(width)
    rows, columns = np.tile(rows, (count, 1)), np.tile(columns, (count, 1))
    if "crop" in augmentation:
        pad = 4
        mode: Any = "constant" if "pad" in augmentation else "symmetric"
        images = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode=mode)
        rows += generator.integers(0, 2 * pad + 1, (count, 1))
        columns += generator.integers(0, 2 * pad + 1, (count, 1))
    if "flip" in augmentation:
        mirrored = generator.random((count, 1)) < 0.5
        columns = np.where(mirrored, columns[:, ::-1], columns)
    images = images[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    if "cutout" in augmentation:
        rows, columns = (
            np.abs(2 * (np.arange(size) - generator.integers(0, size, (count, 1))) + 1) < 16
            for size in (height, width)
        )
        images[rows[:, :, None] & columns[:, None, :]] = 0
    return images


class Batches(keras.utils.PyDataset):
    """Random batches, without replacement within a pass over the images.

    Training is divided into chunks, which are epochs to Keras and need not be passes.
    """

    def __init__(
        self, split: data.Split, recipe: Recipe, seed: int, chunk: int | None = None
    ) -> None:
        super().__init__()
        self.split, self.recipe, self.seed = split, recipe, seed
        self.chunk = chunk or chunk_steps(recipe.steps)
        self.epoch = 0
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.chunk

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        step = self.epoch * self.chunk + index
        total = len(self.split.images)
        wanted = step * self.recipe.batch_size + np.arange(self.recipe.batch_size)
        chosen = np.array([self._order(at // total)[at % total] for at in wanted])
        generator = np.random.default_rng([self.seed, 1, step])
        images = augmented(self.split.images[chosen], self.recipe.augmentation, generator)
        return images.astype("float32"), self.split.labels[chosen]

    def _order(self, number: int) -> np.ndarray:
        """The order of the images in one pass."""
        if number not in self._orders:
            generator = np.random.default_rng([self.seed, 0, number])
            order = generator.permutation(len(self.split.images))
            # Batches are asked for in order: passes before the last one are over.
            kept = {old: self._orders[old] for old in self._orders if old == number - 1}
            self._orders = {**kept, number: order}
        return self._orders[number]


class Progress(keras.callbacks.Callback):
    """Tells the batches where training stands, and keeps its time across interruptions."""

    def __init__(self, batches: keras.utils.PyDataset, file: pathlib.Path) -> None:
        super().__init__()
        self.batches, self.file = batches, file
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        if not self.seconds and epoch and self.file.exists():
            self.seconds = json.loads(self.file.read_text())[:epoch]
        self.batches.epoch = epoch
        # Keras does not save where random numbers stand: each epoch has a place for them.
        for variable in self.model.non_trainable_variables:
            if variable.name == "seed_generator_state":
                seed = keras.ops.convert_to_numpy(variable)[0]
                variable.assign(np.array([seed, epoch << 20], "uint32"))
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.seconds.append(time.perf_counter() - self.start)
        runs.write_json(self.file, self.seconds)


def chunk_steps(steps: int, longest: int = 500) -> int:
    """The largest divisor up to `longest`: after so many steps, state is saved.

    Where all divisors are small (a prime number), the whole training is one chunk.
    """
    chunk = max(d for d in range(1, longest + 1) if steps % d == 0)
    return chunk if chunk >= longest // 10 else steps


def fit(
    model: keras.Model,
    batches: keras.utils.PyDataset,
    recipe: Recipe,
    folder: pathlib.Path,
    callbacks: list[keras.callbacks.Callback] | None = None,
    verbose: int = 0,
) -> dict:
    """Trains for the recipe's steps; goes on where an interrupted call stopped.

    `batches` are `Batches` or `stream.StreamedBatches`: a chunk long each,
    whose number they take in `epoch`. State is saved in `folder` after each. Returns
    the final loss, the seconds of all calls, and the images per second (the median over
    epochs, so that compilation does not count).
    """
    progress = Progress(batches, folder / "seconds.json")
    history = model.fit(
        batches,
        epochs=recipe.steps // len(batches),
        shuffle=False,
        callbacks=[
            keras.callbacks.BackupAndRestore(str(folder / "state")),
            progress,
            keras.callbacks.TerminateOnNaN(),
            *(callbacks or []),
        ],
        verbose=verbose,
    )
    loss = history.history["loss"][-1]
    if not np.isfinite(loss):
        raise nsl_keras.NonFiniteLossError(f"The training loss is {loss}.")
    progress.file.unlink()
    images = len(batches) * recipe.batch_size
    return {
        "training_loss": float(loss),
        "seconds": round(sum(progress.seconds), 1),
        "images_per_second": round(images / statistics.median(progress.seconds), 1),
    }
