r"""Whether a dynamic `M` helps networks of three convolutions, and what does it for less.

    KERAS_BACKEND=jax python -m experiments.small --data_dir=FOLDER

Each network is trained with a dynamic diagonal `M`, with squeeze-excite and CondConv of
equal parameters, and plain: with equal, two and four times the parameters, for as many
epochs and for as long as the dynamic one takes. Every seed draws training images, of which
all rows get the same. Rates are the best of half decades on validation images with one
seed; those next to the chosen one are tried too. Times are those of the processor.
"""

import functools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from absl import flags
from keras import layers

from experiments.common import command, data, rivals, runs
from experiments.no_harm.data import draw
from experiments.small import table
from experiments.small.table import Cell
from experiments.speed import timing
from nsl_keras.layers import BatchNormalization, NeuralSimilarityConv2D
from nsl_keras.predictors import SimilarityPredictor

FLAGS = flags.FLAGS

#: Half decades, and the one that trials start from.
RATES = tuple(float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 3))
START = 3e-2
#: The seed of trials.
TRIED = 1_000
BATCH, EVALUATED = 50, 500
#: Training images, those that they are drawn from, and epochs of strided networks.
DATASETS = {
    "mnist": (2_000, 10_000, 20),
    "cifar10": (8_000, 20_000, 10),
    "digits": (500, 1_000, 20),
}
KINDS: dict[str, Callable[..., keras.layers.Layer]] = {
    "plain": layers.Conv2D,
    "dynamic": functools.partial(
        NeuralSimilarityConv2D, similarity="diagonal", predictor=SimilarityPredictor()
    ),
    "squeeze-excite": rivals.SqueezeExciteConv2D,
    "CondConv": rivals.ConditionalConv2D,
}
#: Filters of the last of three convolutions, for so many parameters; others have less.
FILTERS = {
    "dynamic": {5_000: 17, 12_000: 32},
    "plain": {5_000: 29, 12_000: 45},
    "plain x2": {5_000: 41, 12_000: 64},
    "plain x4": {5_000: 58, 12_000: 91},
    "squeeze-excite": {5_000: 28, 12_000: 44},
    "CondConv": {5_000: 14, 12_000: 22},
}
#: What follows each convolution in a network; without it, they have strides of 2.
NETWORKS: dict[str, list[Callable[[], keras.layers.Layer]]] = {
    "strides": [],
    "pooling": [layers.MaxPooling2D],
    # Together weights of 1, 2, 1 in each direction, with a stride of 2.
    "blur": [
        functools.partial(layers.AveragePooling2D, 2, 1, "same"),
        layers.AveragePooling2D,
    ],
    "flattened": [],
}
Timed = Callable[[str], dict]
#: The most telling come first.
CELLS = [
    Cell("mnist", "strides", 12_000),
    Cell("mnist", "strides", 5_000),
    Cell("mnist", "pooling", 12_000),
    Cell("cifar10", "strides", 12_000),
    Cell("mnist", "blur", 12_000),
    Cell("mnist", "flattened", 12_000),
    Cell("mnist", "pooling", 5_000),
    Cell("cifar10", "pooling", 12_000),
    Cell("cifar10", "strides", 5_000),
    Cell("cifar10", "blur", 12_000),
    *(Cell("digits", network, 5_000) for network in NETWORKS),
]


@functools.cache
def read(dataset: str) -> data.ImageData:
    return data.load(dataset, FLAGS.data_dir, DATASETS[dataset][1]).standardized


def build(cell: Cell, own: str) -> keras.Model:
    """The network of the convolutions `own`, a key of `FILTERS`."""
    inputs = x = keras.Input(read(cell.data).image_shape)
    last, follow = FILTERS[own][cell.size], NETWORKS[cell.network]
    for part in (4, 2, 1):
        options: dict[str, Any] = {"strides": 1 if follow else 2, "padding": "same"}
        make = KINDS[own.split(" x")[0]]
        x = make(round(last / part), 3, use_bias=False, **options)(x)
        x = layers.ReLU()(BatchNormalization(momentum=0.9)(x))
        for layer in follow:
            x = layer()(x)
    flat = layers.Flatten if cell.network == "flattened" else layers.GlobalAveragePooling2D
    return keras.Model(inputs, layers.Dense(10)(flat()(x)))


@functools.lru_cache(maxsize=2 * len(FILTERS))
def compiled(cell: Cell, own: str) -> keras.Model:
    """Compiled once for all rates and seeds."""
    model = build(cell, own)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    jit = keras.backend.backend() == "jax"
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=jit)
    return model


def fit(model: keras.Model, split: data.Split, epochs: int = 1, rate: float = 1e-3) -> dict:
    def cosine(epoch: int, _: float) -> float:
        return rate * (1 + math.cos(math.pi * epoch / epochs)) / 2

    falling = keras.callbacks.LearningRateScheduler(cosine)
    options: dict[str, Any] = {"epochs": epochs, "callbacks": [falling], "verbose": 0}
    return model.fit(split.images, split.labels, BATCH, **options).history


def accuracy(model: keras.Model, split: data.Split) -> float:
    return model.evaluate(split.images, split.labels, EVALUATED, verbose=0)[1]


def times(cell: Cell, own: str) -> dict[str, Any]:
    """The times of a training step and of inference over the plain network's."""
    few = read(cell.data).train.take(2 * EVALUATED)
    record: dict[str, Any] = {"method": own, **cell._asdict()}
    for name, step in {"step": fit, "inference": accuracy}.items():
        both = {
            each: functools.partial(step, compiled(cell, each), few)
            for each in ("plain", own)
        }
        ratios = timing.ratios_to_first(both, FLAGS.rounds, clock=time.process_time)
        record[name] = ratios[own]["median"]
    print(record, flush=True)
    return record | runs.about("small")


def run(cell: Cell, name: str, seed: int, rate: float, timed: Timed, trial: bool) -> dict:
    keras.utils.set_random_seed(seed)
    row, found, (count, _, epochs) = table.ROWS[name], read(cell.data), DATASETS[cell.data]
    model = compiled(cell, row.own)
    model.set_weights(build(cell, row.own).get_weights())
    for variable in model.optimizer.variables:
        variable.assign(np.zeros(variable.shape, variable.dtype))
    if NETWORKS[cell.network]:  # Convolutions without strides take four times as long.
        epochs //= 2
    own, dynamic = timed(row.own), timed("dynamic")
    if row.equal_time:
        epochs = max(1, round(epochs * dynamic["step"] / own["step"]))
    epochs = FLAGS.epochs or epochs
    start = time.process_time()
    history = fit(model, draw(found.train, count, seed), epochs, rate)
    seconds = time.process_time() - start
    record = {
        **{"method": name, "seed": seed, "rate": rate, "epochs": epochs, **cell._asdict()},
        "parameters": sum(math.prod(each.shape) for each in model.trainable_variables),
        **{"seconds": round(seconds, 2), "inference": own["inference"]},
        "training_accuracy": history["accuracy"][-1],
        "accuracy": accuracy(model, found.validation if trial else found.test),
    }
    print(f"{rate:g}: {100 * record['accuracy']:.2f} %, {seconds:.1f} s", flush=True)
    return record | runs.about("small")


def best_rate(start: float, score: Callable[[float], float]) -> float:
    """The best rate, of which the next lower and higher ones were tried too."""
    place = RATES.index(start)
    while True:
        best = RATES.index(max(RATES[place - 1 : place + 2], key=score))
        if best == place:
            return RATES[best]
        place = best


def recorded(records: runs.RunRecords, key: runs.Key, run: Callable[..., dict]) -> dict:
    """The record of a run, which is made where there is none."""
    runs.run_all(records, [key], lambda *_: run())
    return next(each for each in records.runs if each["key"] == [*key])


def study(cell: Cell, name: str, path: pathlib.Path, setting: dict) -> None:
    of_times, trials, records = (
        runs.RunRecords(path, each, setting) for each in ("times", "trials", "")
    )

    def timed(own: str) -> dict:
        return recorded(of_times, (*cell, own), lambda: times(cell, own))

    def trial(rate: float) -> float:
        made = functools.partial(run, cell, name, TRIED, rate, timed, True)
        return recorded(trials, (*cell, name, str(rate)), made)["accuracy"]

    rate = best_rate(START, trial)
    for seed in map(int, FLAGS.seeds):
        made = functools.partial(run, cell, name, seed, rate, timed, False)
        recorded(records, (*cell, name, seed), made)


def main(_arguments: list[str]) -> None:
    results = runs.results_folder(FLAGS.output_dir)
    setting = {"batch": BATCH, "datasets": DATASETS, "epochs": FLAGS.epochs}
    for cell in CELLS:
        chosen = cell.network in (FLAGS.network or NETWORKS)
        if chosen and cell.data in FLAGS.data and str(cell.size) in FLAGS.size:
            for name in FLAGS.method or table.ROWS:
                study(cell, name, results / table.PLACE, setting)
    found = runs.RunRecords(results / table.PLACE).runs
    print(f"\n{table.table(found)}")
    runs.write_figures(results / "figures", table.pictures(found))


if __name__ == "__main__":
    flags.DEFINE_multi_enum("data", ["mnist", "cifar10"], list(DATASETS), "Image sets.")
    flags.DEFINE_multi_enum("network", [], list(NETWORKS), "Networks; all by default.")
    flags.DEFINE_list("size", ["5000", "12000"], "About how many parameters.")
    flags.DEFINE_multi_enum("method", [], list(table.ROWS), "Rows; all by default.")
    flags.DEFINE_string("data_dir", None, "The folder of tfds' prepared image sets.")
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Draws of the training images.")
    flags.DEFINE_integer("epochs", None, "Instead of each network's own.")
    flags.DEFINE_integer("rounds", 9, "Rounds that times are medians of.")
    command.run(main)
