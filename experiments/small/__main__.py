"""Whether a dynamic `M` helps networks of three convolutions, and what does it for less.

    KERAS_BACKEND=jax python -m experiments.small --data_dir=FOLDER

Rows have equal parameters; plain ones two and four times as many too, and the dynamic ones'
time. Each seed draws training images for all rows. Learning rates are the best half decades
on validation images with one seed, both neighbors tried. Times are the processor's.
"""

import functools
import itertools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from absl import flags
from keras import layers

from experiments.common import command, data, rivals, runs, tables
from experiments.common.multiply_adds import multiply_adds
from experiments.no_harm.data import draw
from experiments.speed import timing
from nsl_keras.layers import BatchNormalization, NeuralSimilarityConv2D
from nsl_keras.predictors import SimilarityPredictor
from nsl_keras.visualize.figures import new_figure

FLAGS = flags.FLAGS
PLACE = "small.jsonl"
#: Half decades, the one that trials start from, and their seed.
RATES = [float(f"{digit}e{power}") for power in range(-6, 2) for digit in (1, 3)]
START, TRIED = 3e-2, 1_000
BATCH, EVALUATED, ROUNDS = 50, 500, 9
#: Training images, those that they are drawn from, and epochs of strided networks.
DATASETS = {"mnist": (2_000, 10_000, 20), "cifar10": (8_000, 20_000, 6)}
#: What follows each convolution; without it, convolutions have strides of 2.
NETWORKS: dict[str, Any] = {
    "strides": None,
    "pooling": layers.MaxPooling2D,
    "blur": functools.partial(layers.AveragePooling2D, 3, 2, "same"),
    "flattened": None,
}
DYNAMIC = functools.partial(
    NeuralSimilarityConv2D, similarity="diagonal", predictor=SimilarityPredictor()
)
#: Convolutions, and filters of the last one for about so many parameters.
SIZES = [5_000, 12_000]
CONVOLUTIONS: dict[str, tuple[Any, int, int]] = {
    "plain": (layers.Conv2D, 29, 45),
    "dynamic": (DYNAMIC, 17, 32),
    "plain x4": (layers.Conv2D, 58, 91),
    "squeeze-excite": (rivals.SqueezeExciteConv2D, 28, 44),
    "CondConv": (rivals.ConditionalConv2D, 14, 22),
    "plain x2": (layers.Conv2D, 41, 64),
}
TIME = ", equal time"
METHODS = [*CONVOLUTIONS, *(own + TIME for own in CONVOLUTIONS if "plain" in own)]


@functools.cache
def read(dataset: str) -> data.ImageData:
    return data.load(dataset, FLAGS.data_dir, DATASETS[dataset][1]).standardized


@functools.lru_cache(maxsize=2 * len(CONVOLUTIONS))
def make(dataset: str, network: str, size: int, own: str) -> keras.Model:
    """The model, once for all learning rates and seeds."""
    convolution, *filters = CONVOLUTIONS[own]
    follow, last = NETWORKS[network], filters[SIZES.index(size)]
    inputs = x = keras.Input(read(dataset).image_shape)
    options: dict[str, Any] = {"padding": "same", "strides": 1 if follow else 2}
    for part in (4, 2, 1):
        x = convolution(round(last / part), 3, use_bias=False, **options)(x)
        x = layers.ReLU()(BatchNormalization(momentum=0.9)(x))
        x = follow()(x) if follow else x
    flat = layers.Flatten if network == "flattened" else layers.GlobalAveragePooling2D
    model = keras.Model(inputs, layers.Dense(10)(flat()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    jit = keras.backend.backend() == "jax"
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=jit)
    return model


def fit(model: keras.Model, split: data.Split, epochs: int = 1, rate: float = 1e-3) -> None:
    cosine = [rate * (1 + math.cos(math.pi * n / epochs)) / 2 for n in range(epochs)]
    falling = keras.callbacks.LearningRateScheduler(lambda epoch: cosine[epoch])
    options: dict[str, Any] = {"epochs": epochs, "callbacks": [falling], "verbose": 0}
    model.fit(split.images, split.labels, BATCH, **options)


def accuracy(model: keras.Model, split: data.Split) -> float:
    return model.evaluate(split.images, split.labels, EVALUATED, verbose=0)[1]


def times(*cell: Any) -> dict[str, Any]:
    """The times of a training step and of inference over the plain network's."""
    few, record = read(cell[0]).train.take(2 * EVALUATED), runs.about("small")
    models = {"plain": make(*cell[:-1], "plain"), "own": make(*cell)}
    for name, step in {"step": fit, "inference": accuracy}.items():
        steps = {each: functools.partial(step, models[each], few) for each in models}
        ratios = timing.ratios_to_first(steps, ROUNDS, clock="process_time")
        record[name] = ratios["own"]["median"]
    return record


def study(cell: tuple, name: str, path: pathlib.Path, setting: dict) -> None:
    """Makes the trials and the runs of a row that have no record."""

    def recorded(kind: str, key: runs.Key, run: Callable[..., dict]) -> dict:
        records = runs.RunRecords(path, kind, setting)
        runs.run_all(records, [(*cell, *key)], lambda *_: run())
        return next(each for each in records.runs if each["key"] == [*cell, *key])

    def timed(own: str) -> dict:
        return recorded("times", (own,), functools.partial(times, *cell, own))

    own, found = name.removesuffix(TIME), read(cell[0])
    count, _, epochs = DATASETS[cell[0]]
    if NETWORKS[cell[1]]:  # Convolutions without strides take four times as long.
        epochs //= 2
    if own != name:
        epochs = max(1, round(epochs * timed("dynamic")["step"] / timed(own)["step"]))

    def train(rate: float, seed: int, test: data.Split) -> dict[str, Any]:
        keras.utils.set_random_seed(seed)
        model = make(*cell, own)
        fit(model, found.train.take(BATCH))  # Tracing is not timed.
        model.set_weights(keras.models.clone_model(model).get_weights())
        for variable in model.optimizer.variables:
            variable.assign(np.zeros(variable.shape, variable.dtype))
        start = time.process_time()
        fit(model, draw(found.train, count, seed), epochs, rate)
        record = {
            **{"method": name, "seed": seed, "rate": rate, "epochs": epochs},
            "parameters": sum(math.prod(each.shape) for each in model.trainable_variables),
            "multiply_adds": multiply_adds(model)[0],
            "seconds": round(time.process_time() - start, 2),
            **{"inference": timed(own)["inference"], "accuracy": accuracy(model, test)},
        }
        print({key: record[key] for key in ("rate", "accuracy", "seconds")}, flush=True)
        return record | runs.about("small")

    def trial(rate: float) -> float:
        run = functools.partial(train, rate, TRIED, found.validation)
        return recorded("trials", (name, str(rate)), run)["accuracy"]

    place, best = -1, RATES.index(START)
    while place != best:
        place, best = best, RATES.index(max(RATES[best - 1 : best + 2], key=trial))
    for seed in map(int, FLAGS.seeds):
        run = functools.partial(train, RATES[best], seed, found.test)
        recorded("", (name, seed), run)


def grouped(found: list[dict]) -> dict[tuple, list[dict]]:
    """The runs of each cell and row."""
    groups: dict[tuple, list[dict]] = {}
    for each in sorted(found, key=lambda each: each["key"][:3]):
        groups.setdefault((*each["key"][:3], each["method"]), []).append(each)
    return groups


def table(found: list[dict]) -> str:
    groups, rows = grouped(found), []
    for (*cell, name), own in groups.items():
        shares, dynamic = (
            tables.percent(groups.get((*cell, each), []), each, "accuracy")
            for each in (name, "dynamic")
        )
        above, n = tables.difference(dynamic, shares), len({*shares} & {*dynamic})
        seconds = np.mean([run["seconds"] for run in own])
        cells = [f"{cell[0]}, {cell[1]}, {cell[2]:,}", name, f"{own[0]['parameters']:,}"]
        cells += [tables.million_multiply_adds(own), str(own[0]["epochs"])]
        cells += [f"{own[0]['rate']:g}", tables.mean(shares.values())]
        cells += [f"{above} (n = {n})" if n and name != "dynamic" else ""]
        rows.append([*cells, f"{seconds:.1f}", f"{own[0]['inference']:.2f}"])
    columns = ["network", "convolutions", "parameters", "million multiply-adds"]
    columns += ["epochs", "learning rate", "test accuracy, %", "dynamic above it"]
    return tables.markdown([*columns, "seconds of training", "inference / plain"], rows)


def figures(found: list[dict]) -> dict[str, Any]:
    """Accuracy against parameters and against the time of training."""
    shown = [each for each in DATASETS if each in {run["key"][0] for run in found}]
    made = {f"small_{key}": new_figure(10, 4) for key in ("parameters", "seconds")}
    colors = {name: f"C{number}" for number, name in enumerate(METHODS)}
    markers = dict(zip(NETWORKS, "os^D", strict=True))
    for name, figure in made.items():
        panels, key = figure.subplots(1, len(shown), squeeze=False)[0], name[6:]
        for (dataset, network, _, row), own in grouped(found).items():
            x, y = (np.mean([run[each] for run in own]) for each in (key, "accuracy"))
            panel = panels[shown.index(dataset)]
            panel.plot(x, 100 * y, markers[network], color=colors[row])
            panel.set(title=dataset, xlabel=key, ylabel="test accuracy, %")
        used = {part for cell in grouped(found) for part in cell}
        for label, look in [*colors.items(), *markers.items()]:
            if label not in used:
                continue
            color, marker = (look, "o") if label in colors else ("black", look)
            panels[0].plot([], [], marker, color=color, label=label)
        figure.legend(loc="outside right center", fontsize=7)
    return made


def section(results: pathlib.Path) -> str:
    found = runs.RunRecords(results / PLACE).runs
    return (
        f"## Networks of three convolutions\n\n{tables.commands(found)}: 2,000 images of "
        f"MNIST, 8,000 of CIFAR-10, Adam along a cosine, batches of {BATCH}, the package's "
        "batch norms, global average pooling unless flattened. Mean ± standard deviation "
        "over seeds, differences in points, paired by seed; seconds of the processor; "
        f"inference over the plain network's.\n\n{table(found)}\n\n"
        "![Accuracy against parameters](figures/small_parameters.png)\n\n"
        "![Accuracy against the time of training](figures/small_seconds.png)"
    )


def main(_arguments: list[str]) -> None:
    results = runs.results_folder(FLAGS.output_dir)
    setting = {"batch": BATCH, "datasets": DATASETS}
    cells = itertools.product(FLAGS.data, FLAGS.network, map(int, FLAGS.size))
    for cell, name in itertools.product(cells, FLAGS.method):
        study(cell, name, results / PLACE, setting)
    found = runs.RunRecords(results / PLACE).runs
    print(f"\n{table(found)}")
    runs.write_figures(results / "figures", figures(found))


if __name__ == "__main__":
    flags.DEFINE_multi_enum("data", [*DATASETS], [*DATASETS], "Image sets.")
    flags.DEFINE_multi_enum("network", [*NETWORKS], [*NETWORKS], "Networks.")
    flags.DEFINE_multi_enum("size", [*map(str, SIZES)], [*map(str, SIZES)], "Parameters.")
    flags.DEFINE_multi_enum("method", METHODS, METHODS, "Convolutions.")
    flags.DEFINE_string("data_dir", None, "The folder of tfds' prepared image sets.")
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Draws of the training images.")
    command.run(main)
