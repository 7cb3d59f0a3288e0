"""Two spirals, a linear head, and 100 neighbors: Figure 3 of Meta-Neighborhoods.

A linear classifier cannot tell the spirals apart; one that is finetuned, for each point, on
its neighbors in a learned dictionary can. As in Section 4.1 (Shan et al., NeurIPS 2020):
keys in the plane, values fixed, minus the squared Euclidean distance as similarity.

    python -m experiments.demo.spirals

Writes results/spirals.jsonl and results/figures/spirals.png below --output_dir.
"""

import pathlib
from typing import Any

import keras
import numpy as np
from absl import flags
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

import nsl_keras
from experiments.common import command, runs, tables

FLAGS = flags.FLAGS

TURNS, RADIUS, SEED = 2.0, 3.0, 0
NUM_NEIGHBORS = 100
LIMIT = 1.15 * RADIUS
COLORS, ENTRY_COLORS = ("tab:blue", "gold"), ("tab:green", "tab:red")


def spirals(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Points on two interleaved spirals, with noise, and the spiral of each."""
    labels = np.arange(count) % 2
    share = rng.uniform(0.08, 1, count)
    angle = 2 * np.pi * TURNS * share + np.pi * labels
    points = RADIUS * share[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points += rng.normal(scale=0.06, size=points.shape)
    return points.astype("float32"), labels


def predicted(model: keras.Model, points: np.ndarray) -> np.ndarray:
    return model.predict(points, batch_size=2000, verbose=0).argmax(axis=1)


def compile_model(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.03), loss)
    return model


def neighborhoods() -> keras.Model:
    options = {"metric": "euclidean", "temperature": 0.1, "fixed_values": True}
    dictionary = nsl_keras.layers.NeighborDictionary(
        NUM_NEIGHBORS, dropout=0.0, seed=SEED, **options
    )
    model = nsl_keras.MetaNeighborhoodModel(
        None, keras.layers.Dense(2), dictionary, inner_learning_rate=1.0
    )
    model.build((None, 2))
    # In the plane of the points; the default suits features of unit length.
    start = np.random.default_rng(SEED).normal(size=(NUM_NEIGHBORS, 2))
    model.dictionary.assign(keys=start)
    return compile_model(model)


def draw(axis: Any, model: keras.Model, ways: list[np.ndarray], points: np.ndarray) -> None:
    line = np.linspace(-LIMIT, LIMIT, 100)
    grid = np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2).astype("float32")
    options = {"origin": "lower", "cmap": ListedColormap(COLORS), "alpha": 0.25}
    plane = predicted(model, grid).reshape(100, 100)
    extent = (-LIMIT, LIMIT, -LIMIT, LIMIT)
    axis.imshow(plane, extent=extent, vmin=0, vmax=1, **options)
    axis.scatter(*points.T, s=2, c=[COLORS[each] for each in predicted(model, points)])
    classes = keras.ops.convert_to_numpy(model.dictionary.values).argmax(axis=1)
    for way, label in zip(np.stack(ways, axis=1), classes, strict=True):
        axis.plot(*way.T, ":", color="black", linewidth=0.5, alpha=0.6)
        axis.plot(*way[-1], "o", color=ENTRY_COLORS[label], ms=4, mec="white", mew=0.5)
    axis.set(xlim=(-LIMIT, LIMIT), ylim=(-LIMIT, LIMIT), xticks=[], yticks=[])


def section(results: pathlib.Path) -> str:
    (content,) = runs.read(results / "spirals.jsonl")
    return (
        "## Meta-Neighborhoods, Figure 3: spirals\n\n"
        f"{tables.commands([content])}: {100 * content['test_accuracy']:.1f} % of "
        f"{content['test_examples']:,} test points with {content['num_neighbors']} "
        f"neighbors, {100 * content['linear_test_accuracy']:.1f} % for a linear head by "
        "itself.\n\n"
        "![Entries and classes in training](figures/spirals.png)"
    )


def main(_arguments: list[str]) -> None:
    keras.utils.set_random_seed(SEED)
    rng = np.random.default_rng(SEED)
    train, (points, labels) = (spirals(FLAGS.examples, rng) for _ in range(2))

    def accuracy(model: keras.Model) -> float:
        return float(np.mean(predicted(model, points) == labels))

    linear = compile_model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]))
    linear.fit(*train, batch_size=100, epochs=FLAGS.epochs, verbose=0)
    model = neighborhoods()
    ways: list[np.ndarray] = []

    def note(*_: Any) -> None:
        ways.append(keras.ops.convert_to_numpy(model.dictionary.keys).copy())

    note()
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    # Most of what there is to see happens early.
    stages = (0, FLAGS.epochs // 3, FLAGS.epochs)
    options = {"batch_size": 100, "verbose": 0}
    options["callbacks"] = [keras.callbacks.LambdaCallback(on_epoch_end=note)]
    panels = figure.subplots(1, 3)
    for before, epoch, axis in zip((0, *stages), stages, panels, strict=False):
        model.fit(*train, initial_epoch=before, epochs=epoch, **options)
        draw(axis, model, ways, points)
        axis.set_title(f"epoch {epoch}: {100 * accuracy(model):.1f} %", fontsize=9)
    content = {
        **runs.about("demo.spirals"),
        "train_examples": FLAGS.examples,
        "test_examples": len(points),
        "num_neighbors": NUM_NEIGHBORS,
        "linear_test_accuracy": accuracy(linear),
        "test_accuracy": accuracy(model),
    }
    results = runs.results_folder(FLAGS.output_dir)
    runs.RunRecords(results / "spirals.jsonl").add(("spirals",), content)
    runs.write_figures(results / "figures", {"spirals": figure})
    print(section(results))


if __name__ == "__main__":
    flags.DEFINE_integer("epochs", 120, "Epochs.", lower_bound=3)
    flags.DEFINE_integer("examples", 1000, "Points to train on; as many again to test.")
    command.run(main)
