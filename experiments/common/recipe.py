"""How networks are trained: rates, decay, batches, and runs that can be resumed.

Batches are NumPy arrays, a function of seed and step alone, so that a resumed run
sees what an uninterrupted one would have, on either backend.
"""

import dataclasses
import functools
import itertools
import pathlib
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import keras
import numpy as np
from absl import flags
from keras import ops

import nsl_keras
from experiments.common import data, runs
from experiments.common.losses import SmoothedCrossentropy

FLAGS = flags.FLAGS
flags.DEFINE_float("stop_after_minutes", None, "Stop then; the same command goes on.")

#: Images of a batch in evaluation.
EVALUATED = 100
STARTED = time.monotonic()
#: "crop": padded by 4 pixels of the mirror image, as in the authors' code of Neural
#: Similarity Learning; "pad_crop": by zeros, as in that of Meta-Neighborhoods; "cutout": a
#: square of 16x16 pixels is blackened.
AUGMENTATIONS = (
    *("none", "flip", "crop_flip"),
    *("pad_crop", "pad_crop_flip", "pad_crop_flip_cutout"),
)

#: How far images are shifted at most, in pixels.
PAD = 4


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training, in steps. Shorter ones keep its proportions."""

    #: What a drop divides the rate by.
    drop: ClassVar[float] = 10

    steps: int
    #: Steps after which the rate drops.
    rate_drops: tuple[int, ...] = ()
    learning_rate: float = 0.1
    batch_size: int = 128
    augmentation: str = "none"
    #: `"momentum"`, `"nesterov"`, `"adam"`, `"adamw"` or `"dictionary_sgd"`.
    optimizer: str = "momentum"
    epsilon: float = 1e-8
    #: AdamW's, as in Keras, which multiplies it with the rate.
    weight_decay: float = 0.0
    #: Largest entry of a gradient.
    clip: float | None = None
    cosine_decay: bool = False
    #: Steps in which the rate rises to what it would be otherwise.
    warmup_steps: int = 0
    #: Factor of half the squared weights in the loss.
    penalty: float = 0.0
    label_smoothing: float = 0.0
    #: What black and white, 0 and 1, are to the network.
    input_range: tuple[float, float] = (0.0, 1.0)

    def scaled(self, steps: int) -> Self:
        """The recipe with another number of steps, rate drops in proportion."""
        return dataclasses.replace(
            self,
            steps=steps,
            rate_drops=tuple(round(drop * steps / self.steps) for drop in self.rate_drops),
            warmup_steps=round(self.warmup_steps * steps / self.steps),
        )

    def rates(self) -> float | keras.optimizers.schedules.LearningRateSchedule:
        schedules = keras.optimizers.schedules
        rates: Any = self.learning_rate
        if self.cosine_decay:
            rates = schedules.CosineDecay(rates, self.steps)
        elif self.rate_drops:
            values = [rates / self.drop**n for n in range(len(self.rate_drops) + 1)]
            rates = schedules.PiecewiseConstantDecay(list(self.rate_drops), values)
        return WarmedUp(rates, self.warmup_steps) if self.warmup_steps else rates

    def make_optimizer(self, spared: Sequence[Any] = ()) -> keras.optimizers.Optimizer:
        """The optimizer; AdamW does not decay the `spared` variables."""
        own: dict[str, Any] = {"learning_rate": self.rates(), "clipvalue": self.clip}
        if self.optimizer in ("momentum", "nesterov"):
            nesterov = self.optimizer == "nesterov"
            return keras.optimizers.SGD(**own, momentum=0.9, nesterov=nesterov)
        own["epsilon"] = self.epsilon
        if self.optimizer == "adam":
            return keras.optimizers.Adam(**own)
        adamw = {"adamw": keras.optimizers.AdamW, "dictionary_sgd": DictionarySGD}
        made = adamw[self.optimizer](**own, weight_decay=self.weight_decay)
        made.exclude_from_weight_decay(var_list=list(spared))
        return made

    def penalize(self, variables: Iterable[Any]) -> None:
        for variable in variables:
            if self.penalty and variable.regularizer is None:
                variable.regularizer = keras.regularizers.L2(self.penalty / 2)


class HalvingRecipe(Recipe):
    drop = 2


@keras.saving.register_keras_serializable("nsl_keras_experiments")
class DictionarySGD(keras.optimizers.AdamW):
    """AdamW for all but a dictionary, which takes steps of SGD with a momentum of 0.9.

    Their rate is 100 times AdamW's: 0.1 beside 1e-3.
    """

    def build(self, variables: list) -> None:
        super().build(variables)
        velocities = {
            each.path: self.add_variable_from_reference(each, name="velocity")
            for each in variables
            if "neighbor_dictionary" in each.path
        }
        # Keras would take all that an attribute holds for the optimizer's own.
        object.__setattr__(self, "parts", (list(variables), velocities))

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        (variables, velocities), others = self.parts, []
        for gradient, each in zip(grads, trainable_variables or variables, strict=True):
            velocity = velocities.get(each.path)
            if velocity is None:
                others.append((gradient, each))
                continue
            clipped = ops.clip(gradient, -self.clipvalue, self.clipvalue)
            velocity.assign(0.9 * velocity - 100 * self.learning_rate * clipped)
            each.assign_add(velocity)
        return super().apply(*zip(*others, strict=True))


@keras.saving.register_keras_serializable("nsl_keras_experiments")
class WarmedUp(keras.optimizers.schedules.LearningRateSchedule):
    """Rates that rise from near 0 in the first steps, in proportion to the step."""

    def __init__(self, rates: Any, warmup_steps: int) -> None:
        self.rates, self.warmup_steps = rates, warmup_steps

    def __call__(self, step: Any) -> Any:
        rate = self.rates(step) if callable(self.rates) else self.rates
        share = (ops.cast(step, "float32") + 1) / self.warmup_steps
        return rate * ops.minimum(share, 1.0)

    def get_config(self) -> dict[str, Any]:
        return {"rates": self.rates, "warmup_steps": self.warmup_steps}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        rates = keras.saving.deserialize_keras_object(config["rates"])
        return cls(rates, config["warmup_steps"])


def compile_classifier(
    model: keras.Model,
    recipe: Recipe,
    spared: Sequence[Any] = (),
    top_5: bool = False,
    jit_compile: bool | str = "auto",
) -> keras.Model:
    """Compiles a model that gives logits, for integer labels; returns what to train."""
    metrics: list = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
    if top_5:
        metrics.append(keras.metrics.SparseTopKCategoricalAccuracy(5, name="top_5"))
    loss: keras.losses.Loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if recipe.label_smoothing:
        loss = SmoothedCrossentropy(recipe.label_smoothing)
    optimizer = recipe.make_optimizer(spared)
    model.compile(optimizer, loss, metrics=metrics, jit_compile=jit_compile)
    # Now, so that a restored state finds its place.
    model.optimizer.build(model.trainable_variables)
    return model


def spared_of(model: keras.Model) -> list:
    """What weight decay spares, as the authors': the classifier, dictionary and rates."""
    if hasattr(model, "decay_exempt_variables"):
        return model.decay_exempt_variables
    return model.layers[-1].trainable_variables


def augmented(
    images: np.ndarray, augmentation: str, generator: np.random.Generator
) -> np.ndarray:
    count, height, width, _ = images.shape
    rows = np.tile(np.arange(height), (count, 1))
    columns = np.tile(np.arange(width), (count, 1))
    if "crop" in augmentation:
        mode: Any = "constant" if "pad" in augmentation else "symmetric"
        images = np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)), mode=mode)
        rows += generator.integers(0, 2 * PAD + 1, (count, 1))
        columns += generator.integers(0, 2 * PAD + 1, (count, 1))
    if "flip" in augmentation:
        mirrored = generator.random((count, 1)) < 0.5
        columns = np.where(mirrored, columns[:, ::-1], columns)
    moved = images[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    if "cutout" in augmentation:
        cut_rows, cut_columns = (
            np.abs(2 * (np.arange(size) - generator.integers(0, size, (count, 1))) + 1) < 16
            for size in (height, width)
        )
        moved[cut_rows[:, :, None] & cut_columns[:, None, :]] = 0
    return moved


class Batches(keras.utils.PyDataset):
    """Random batches, without replacement within a pass over the images.

    Training is divided into chunks, which are epochs to Keras and need not be passes.
    """

    def __init__(self, split: data.Split, recipe: Recipe, seed: int, chunk: int) -> None:
        super().__init__()
        self.split, self.recipe, self.seed, self.chunk = split, recipe, seed, chunk
        self.epoch = 0

    def __len__(self) -> int:
        return self.chunk

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        step = self.epoch * self.chunk + index
        total = len(self.split.images)
        wanted = step * self.recipe.batch_size + np.arange(self.recipe.batch_size)
        chosen = [_order(self.seed, at // total, total)[at % total] for at in wanted]
        generator = np.random.default_rng([self.seed, 1, step])
        images = self.split.images[chosen]
        images = augmented(images, self.recipe.augmentation, generator)
        white = np.float32(255 if images.dtype == np.uint8 else 1)
        return images.astype("float32") / white, self.split.labels[chosen]


# Batches are asked for in order: passes before the last one are over.
@functools.lru_cache(maxsize=2)
def _order(seed: int, number: int, examples: int) -> np.ndarray:
    return np.random.default_rng([seed, 0, number]).permutation(examples)


def chunk_steps(steps: int, longest: int) -> int:
    """The largest divisor up to `longest`: after so many steps, state is saved."""
    chunk = max(d for d in range(1, longest + 1) if steps % d == 0)
    if chunk == steps or chunk >= longest // 10:
        return chunk
    print(f"An interrupted run begins anew: {steps:,} steps have no fitting divisor.")
    return steps


def fit(
    model: keras.Model,
    batches: keras.utils.PyDataset,
    recipe: Recipe,
    folder: pathlib.Path,
    verbose: int = 0,
    validation: data.Split | None = None,
) -> dict:
    """Trains for the recipe's steps; goes on where an interrupted call stopped.

    `batches` are a chunk long. After each chunk state is kept in `folder`, until the caller
    deletes it; a training that is finished there is not trained again. Returns the final
    loss, the seconds of all calls, and the images per second (the median over chunks, so
    that compilation does not count); with images of `validation`, the accuracy after each
    chunk too. Raises `nsl_keras.NonFiniteLossError` if the loss diverges.
    """
    epochs = recipe.steps // len(batches)
    backup = nsl_keras.callbacks.TrainingBackup(
        folder / f"chunks_of_{len(batches)}", delete_checkpoint=False
    )
    running = [backup, StopInTime(batches), keras.callbacks.TerminateOnNaN()]
    options: dict[str, Any] = {"shuffle": False, "verbose": verbose}
    if validation is not None:
        options["validation_data"] = validation.images, validation.labels
        options["validation_batch_size"] = EVALUATED
    history = model.fit(batches, epochs=epochs, callbacks=running, **options).history
    loss, seconds = history["loss"][-1], history["seconds"]
    if not np.isfinite(loss):
        raise nsl_keras.NonFiniteLossError(f"The training loss is {loss}.")
    images = len(batches) * recipe.batch_size
    found = {
        "training_loss": loss,
        "seconds": round(sum(seconds), 1),
        "images_per_second": round(images / statistics.median(seconds), 1),
    }
    if validation is not None:
        numbered = enumerate(history["val_accuracy"], start=1)
        curve = [[len(batches) * number, round(share, 4)] for number, share in numbered]
        found["validation_curve"] = curve
    return found


class OutOfTime(SystemExit):
    """Ends a process before its runs are finished, with the system's code for that."""

    CODE = 75

    def __init__(self, message: str) -> None:
        print(f"{message} The same command goes on.", flush=True)
        super().__init__(self.CODE)


class StopInTime(keras.callbacks.Callback):
    """Stops before a chunk that may end too late: it is taken to last as the last.

    The first chunk of a call begins if the deadline is still to come, or calls shorter than
    a chunk would never get on. `batches` get the number of each chunk, whose seconds are
    added to its logs. A backup comes before it in the list.
    """

    def __init__(self, batches: keras.utils.PyDataset) -> None:
        super().__init__()
        self.batches, self.expected = batches, 0.0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.batches.epoch = epoch
        self.start = time.perf_counter()
        minutes = FLAGS.stop_after_minutes if FLAGS.is_parsed() else None
        end = time.monotonic() + self.expected
        if minutes is not None and end > STARTED + 60 * minutes:
            raise OutOfTime(f"Stopped after {epoch * len(self.batches):,} steps.")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.expected = logs["seconds"] = time.perf_counter() - self.start


def first_record(
    module: str, name: str, seed: int, model: keras.Model | None = None
) -> dict:
    """What is known of a run before it starts."""
    record: dict[str, Any] = {"method": name, "seed": seed}
    if model is not None:
        weights = model.trainable_variables
        record["parameters"] = sum(int(np.prod(each.shape)) for each in weights)
    return record | runs.about(module) | {"devices": keras.distribution.list_devices()}


def peak_memory() -> dict[str, int]:
    """The most bytes that the process has taken on a GPU; empty where it cannot be told."""
    if keras.backend.backend() != "jax":
        return {}
    import jax

    key, found = "peak_bytes_in_use", jax.devices()[0].memory_stats() or {}
    return {key: found[key]} if key in found else {}


def evaluated_parts(found: data.ImageData, trial: bool = False) -> dict[str, dict]:
    """Validation images that took no part in training, and but in trials the test."""
    parts = {"validation": found.validation} | ({} if trial else {"test": found.test})
    return {
        part: {"x": split.images, "y": split.labels, "batch_size": EVALUATED}
        for part, split in parts.items()
        if len(split.images)
    }


def evaluate(model: keras.Model, evaluated: Mapping[str, dict]) -> dict[str, float]:
    """Metrics by the names of parts, from the arguments of `evaluate` for each.

    Of a model with a dictionary also those before adaptation, named `unadapted`.
    """
    models = {"": model}
    if isinstance(model, nsl_keras.MetaNeighborhoodModel):
        models["unadapted_"] = model.unadapted
        model.unadapted.compile(loss=model.loss, metrics=["accuracy"])
    record = {}
    for (part, images), prefix in itertools.product(evaluated.items(), models):
        found = models[prefix].evaluate(**images, verbose=0, return_dict=True)
        del found["loss"]
        record |= {f"{part}_{prefix}{key}": float(found[key]) for key in found}
    return record
