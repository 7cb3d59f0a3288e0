"""How image networks are trained: rates, decay, batches, and runs that can be resumed.

The published recipes of Neural Similarity Learning, in iterations; shorter budgets keep
their proportions (those of Meta-Neighborhoods: neighborhood_recipe.py). Batches are NumPy
arrays, a function of seed and iteration alone, so that a resumed run sees what an
uninterrupted one would have, on either backend.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import time
from typing import Any, Self

import keras
import numpy as np

import nsl_keras
from examples import image_data

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
class Schedule:
    """The part of a recipe that `Batches` and `fit` know."""

    iterations: int
    rate_drops: tuple[int, ...]
    learning_rate: float = 0.1
    batch_size: int = 128
    augmentation: str = "crop_flip"

    def scaled(self, iterations: int) -> Self:
        """The recipe with another number of iterations, rate drops in proportion."""
        return dataclasses.replace(
            self,
            iterations=iterations,
            rate_drops=tuple(
                round(drop * iterations / self.iterations) for drop in self.rate_drops
            ),
        )

    def rates(self) -> float | keras.optimizers.schedules.LearningRateSchedule:
        """The rate, divided by 10 at each drop."""
        if not self.rate_drops:
            return self.learning_rate
        return keras.optimizers.schedules.PiecewiseConstantDecay(
            list(self.rate_drops),
            [self.learning_rate / 10**drops for drops in range(len(self.rate_drops) + 1)],
        )


@dataclasses.dataclass(frozen=True)
class Recipe(Schedule):
    """A training; `decay` is a factor of half the squared weights, as the authors' is."""

    optimizer: str = "momentum"
    label_smoothing: float = 0.01
    decay: float = 5e-4
    unconstrained_similarity_decay: float = 5e-3
    batch_normalization_momentum: float = 0.999
    # What images in [0, 1] are multiplied with, and what is then added.
    input_scale: float = 255.0
    input_offset: float = 0.0


#: "paper": Section 7.1. "code": the authors' published scripts for images. "imagenet":
#: Section 7.1. "attention": the authors' script for Table 8.
RECIPES = {
    "paper": Recipe(64_000, (34_000, 54_000)),
    "code": Recipe(42_500, (20_000, 30_000, 37_500)),
    "imagenet": Recipe(600_000, (200_000, 375_000, 550_000)),
    "attention": Recipe(
        64_001,
        (34_000, 54_000),
        optimizer="adam",
        learning_rate=1e-3,
        augmentation="flip",
        input_scale=255 / 128,
        input_offset=-127.5 / 128,
    ),
}


def optimizer(recipe: Recipe) -> keras.optimizers.Optimizer:
    """The recipe's optimizer."""
    if recipe.optimizer == "adam":
        return keras.optimizers.Adam(recipe.rates(), epsilon=1e-8)
    return keras.optimizers.SGD(recipe.rates(), momentum=0.9)


def add_decay(model: keras.Model, recipe: Recipe) -> None:
    """Puts the authors' L2 penalty on all kernels, gammas and betas without one.

    Predictors' are among them; of the similarities, only the static unconstrained one is
    decayed, as in the authors' code (towards zero, not towards the identity).
    """
    for variable in model.trainable_variables:
        if variable.regularizer is None and variable.name in ("kernel", "gamma", "beta"):
            variable.regularizer = keras.regularizers.L2(recipe.decay / 2)
    for layer in model.layers:
        if not isinstance(layer, nsl_keras.layers.NeuralSimilarityConv2D):
            continue
        unconstrained = isinstance(layer.similarity, nsl_keras.similarities.Unconstrained)
        if layer.predictor is None and unconstrained:
            layer.similarity_parameters.regularizer = keras.regularizers.L2(
                recipe.unconstrained_similarity_decay / 2
            )


def trainable(
    backbone: keras.Model, recipe: Recipe, jit_compile: bool | str = "auto"
) -> keras.Model:
    """A compiled model from images in [0, 1] to the backbone's logits."""
    inputs = keras.Input(backbone.input_shape[1:])
    # Not keras.layers.Rescaling, which looks for TensorFlow on every backend.
    scaled = inputs * recipe.input_scale + recipe.input_offset
    add_decay(backbone, recipe)
    model = keras.Model(inputs, backbone(scaled), name=f"{backbone.name}_on_images")
    metrics: list = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    if backbone.output_shape[-1] > 5:
        metrics.append(keras.metrics.SparseTopKCategoricalAccuracy(5, name="top_5"))
    model.compile(
        optimizer=optimizer(recipe),
        loss=nsl_keras.losses.SmoothedCrossentropy(recipe.label_smoothing),
        metrics=metrics,
        jit_compile=jit_compile,
    )
    # Now, so that a restored state finds its place.
    model.optimizer.build(model.trainable_variables)
    return model


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

    Training is divided into epochs of `steps` iterations, which need not be passes.
    """

    def __init__(self, split: image_data.Split, recipe: Schedule, seed: int) -> None:
        super().__init__()
        self.split, self.recipe, self.seed = split, recipe, seed
        self.steps = chunk_steps(recipe.iterations)
        self.epoch = 0
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        iteration = self.epoch * self.steps + index
        total = len(self.split.images)
        wanted = iteration * self.recipe.batch_size + np.arange(self.recipe.batch_size)
        chosen = np.array([self._order(at // total)[at % total] for at in wanted])
        generator = np.random.default_rng([self.seed, 1, iteration])
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
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.seconds))


def chunk_steps(iterations: int, longest: int = 500) -> int:
    """The largest divisor up to `longest`: after so many iterations, state is saved.

    Where all divisors are small (a prime number), the whole training is one chunk.
    """
    steps = max(d for d in range(1, longest + 1) if iterations % d == 0)
    return steps if steps >= longest // 10 else iterations


def fit(
    model: keras.Model,
    batches: keras.utils.PyDataset,
    recipe: Schedule,
    folder: pathlib.Path,
    callbacks: list[keras.callbacks.Callback] | None = None,
    verbose: int = 0,
) -> dict:
    """Trains for the recipe's iterations; goes on where an interrupted call stopped.

    `batches` are `Batches` or `image_stream.StreamedBatches`: they have `steps` an epoch,
    and take its number in `epoch`. State is saved in `folder` after each epoch. Returns
    the final loss, the seconds of all calls, and the images per second (the median over
    epochs, so that compilation does not count).
    """
    progress = Progress(batches, folder / "seconds.json")
    history = model.fit(
        batches,
        epochs=recipe.iterations // batches.steps,
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
    images = batches.steps * recipe.batch_size
    return {
        "training_loss": float(loss),
        "seconds": round(sum(progress.seconds), 1),
        "images_per_second": round(images / statistics.median(progress.seconds), 1),
    }
