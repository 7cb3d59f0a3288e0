r"""Two spirals, a linear head, and 100 neighbours: Figure 3 of Meta-Neighborhoods.

A linear classifier cannot tell the spirals apart; one that is finetuned, for each point, on
its neighbours in a learned dictionary can. As in Section 4.1 (Shan et al., NeurIPS 2020):
keys in the plane, random at first and then learned, values fixed, minus the squared
Euclidean distance as similarity, temperature 0.1.

    python -m experiments.demo.spirals

Writes results/spirals.jsonl, results/figures/spirals.png, and an animation of the training,
results/figures/spirals.gif, below --output_dir.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from absl import flags, logging

import nsl_keras
from experiments.common import command, runs, tables
from nsl_keras.training import files

FLAGS = flags.FLAGS

TURNS = 2.0
RADIUS = 3.0
COLORS = ("tab:blue", "gold")
ENTRY_COLORS = ("tab:green", "tab:red")


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The model after some epochs: keys, accuracy, and the class of each grid point."""

    epoch: int
    keys: np.ndarray
    test_accuracy: float
    regions: np.ndarray


def spirals(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Points on two interleaved spirals, with noise, and the spiral of each."""
    labels = np.arange(count) % 2
    share = rng.uniform(0.08, 1, count)
    angle = 2 * np.pi * TURNS * share + np.pi * labels
    points = RADIUS * share[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points += rng.normal(scale=0.06, size=points.shape)
    return points.astype("float32"), labels


def grid(size: int = 100) -> np.ndarray:
    axis = np.linspace(-1.15 * RADIUS, 1.15 * RADIUS, size)
    return np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2).astype("float32")


def predicted_classes(model: keras.Model, points: np.ndarray) -> np.ndarray:
    return model.predict(points, batch_size=2000, verbose=0).argmax(axis=1)


class TakeSnapshots(keras.callbacks.Callback):
    """Takes one before the first epoch, and then as many as frames are wanted."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.x, self.y = x, y
        self.snapshots: list[Snapshot] = []
        # Most of what there is to see happens early.
        share = np.linspace(0, 1, FLAGS.frames) ** 1.7
        self.epochs = {round(FLAGS.epochs * each) for each in share}

    def on_train_begin(self, logs=None) -> None:
        self.take(0)

    def on_epoch_end(self, epoch: int, logs=None) -> None:
        if epoch + 1 in self.epochs:
            self.take(epoch + 1)

    def take(self, epoch: int) -> None:
        dictionary = self.model.dictionary
        self.snapshots.append(
            Snapshot(
                epoch,
                keras.ops.convert_to_numpy(dictionary.keys).copy(),
                float(np.mean(predicted_classes(self.model, self.x) == self.y)),
                predicted_classes(self.model, grid()),
            )
        )


def compile_model(model: keras.Model) -> None:
    model.compile(
        optimizer=keras.optimizers.Adam(0.03),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def train_linear(train, test) -> float:
    """The test accuracy of the linear head by itself."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    compile_model(model)
    model.fit(*train, batch_size=100, epochs=FLAGS.epochs, verbose=0)
    return float(np.mean(predicted_classes(model, test[0]) == test[1]))


def train_neighborhoods(train, test):
    """Returns the trained model and the snapshots taken on the way."""
    model = nsl_keras.MetaNeighborhoodModel(
        None,
        keras.layers.Dense(2),
        nsl_keras.layers.NeighborDictionary(
            FLAGS.num_neighbors,
            metric="euclidean",
            temperature=0.1,
            fixed_values=True,
            dropout=0.0,
            seed=FLAGS.seed,
        ),
        inner_learning_rate=1.0,
    )
    model.build((None, 2))
    # In the plane of the points; the default suits features of unit length.
    start = np.random.default_rng(FLAGS.seed).normal(size=(FLAGS.num_neighbors, 2))
    model.dictionary.assign(keys=start)
    compile_model(model)
    taking = TakeSnapshots(*test)
    model.fit(*train, batch_size=100, epochs=FLAGS.epochs, verbose=0, callbacks=[taking])
    return model, taking.snapshots


def draw(axis, snapshots: list[Snapshot], number: int, classes, points) -> None:
    """Draws a snapshot: regions, test points, entries and the ways they came."""
    snapshot = snapshots[number]
    side = int(np.sqrt(len(snapshot.regions)))
    limit = 1.15 * RADIUS
    axis.clear()
    axis.imshow(
        snapshot.regions.reshape(side, side),
        origin="lower",
        extent=(-limit, limit, -limit, limit),
        cmap=_color_map(COLORS),
        alpha=0.25,
        vmin=0,
        vmax=1,
    )
    found = snapshot.regions[_nearest_grid_points(points)]
    axis.scatter(*points.T, s=2, c=[COLORS[label] for label in found])
    ways = np.stack([each.keys for each in snapshots[: number + 1]])
    for entry, label in enumerate(classes):
        axis.plot(*ways[:, entry].T, ":", color="black", linewidth=0.5, alpha=0.6)
        axis.plot(
            *ways[-1, entry], "o", color=ENTRY_COLORS[label], markersize=4, mec="white",
            mew=0.5,
        )  # fmt: skip
    axis.set(xlim=(-limit, limit), ylim=(-limit, limit), xticks=[], yticks=[])
    axis.set_title(
        f"epoch {snapshot.epoch}: {100 * snapshot.test_accuracy:.1f} %", fontsize=9
    )


def _color_map(colors):
    from matplotlib.colors import ListedColormap

    return ListedColormap(colors)


def _nearest_grid_points(points: np.ndarray) -> np.ndarray:
    side = int(np.sqrt(len(grid())))
    step = 2.3 * RADIUS / (side - 1)
    columns, rows = np.clip(
        np.round((points + 1.15 * RADIUS) / step).astype(int), 0, side - 1
    ).T
    return rows * side + columns


def write_pictures(
    snapshots: list[Snapshot], classes, points, folder: pathlib.Path
) -> list[pathlib.Path]:
    from matplotlib.animation import PillowWriter
    from matplotlib.figure import Figure

    chosen = (0, len(snapshots) // 2, len(snapshots) - 1)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axis, number in zip(figure.subplots(1, 3), chosen, strict=True):
        draw(axis, snapshots, number, classes, points)
    written = [folder / "spirals.png"]
    with files.replacing(written[0]) as scratch:
        figure.savefig(scratch, dpi=110)

    figure = Figure(figsize=(3.6, 3.8), layout="constrained")
    axis = figure.subplots()
    written.append(folder / "spirals.gif")
    writer = PillowWriter(fps=5)
    with (
        files.replacing(written[-1]) as scratch,
        writer.saving(figure, str(scratch), dpi=90),
    ):
        for number in [*range(len(snapshots)), *[len(snapshots) - 1] * 8]:
            draw(axis, snapshots, number, classes, points)
            writer.grab_frame()
    return written


def section(results: pathlib.Path) -> str:
    """The section of results/README.md."""
    title = "## Meta-Neighborhoods, Figure 3: spirals"
    found = runs.read(results / "spirals.jsonl")
    if not found:
        return f"{title}\n\nNot run."
    (content,) = found
    return (
        f"{title}\n\n"
        f"{tables.commands([content])}: {100 * content['test_accuracy']:.1f} % of "
        f"{content['test_examples']:,} test points with {content['num_neighbors']} "
        f"neighbours, {100 * content['linear_test_accuracy']:.1f} % for a linear head by "
        "itself.\n\n"
        "![Entries and classes in training](figures/spirals.png)"
    )


def main(_arguments: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)
    keras.utils.set_random_seed(FLAGS.seed)
    rng = np.random.default_rng(FLAGS.seed)
    train, test = spirals(FLAGS.examples, rng), spirals(FLAGS.examples, rng)
    linear = train_linear(train, test)
    model, snapshots = train_neighborhoods(train, test)
    plain = keras.ops.convert_to_numpy(model(test[0], adapt=False)).argmax(axis=1)
    values = keras.ops.convert_to_numpy(model.dictionary.values)
    content = {
        "command": runs.command("demo.spirals"),
        "versions": runs.versions(),
        "train_examples": len(train[0]),
        "test_examples": len(test[0]),
        "num_neighbors": FLAGS.num_neighbors,
        "linear_test_accuracy": linear,
        "test_accuracy": snapshots[-1].test_accuracy,
        "unadapted_test_accuracy": float(np.mean(plain == test[1])),
        "test_accuracies": {s.epoch: s.test_accuracy for s in snapshots},
    }
    print(f"linear head: {100 * linear:.1f} % of test points")
    print(f"with Meta-Neighborhoods: {100 * content['test_accuracy']:.1f} %")
    print(f"its head before it adapts: {100 * content['unadapted_test_accuracy']:.1f} %")
    folder = runs.results_folder(FLAGS.output_dir)
    path = folder / "spirals.jsonl"
    runs.RunRecords(path).add(("spirals",), content)
    pictures = write_pictures(snapshots, values.argmax(axis=1), test[0], folder / "figures")
    for written in (path, *pictures):
        print(f"Wrote {written}")


if __name__ == "__main__":
    flags.DEFINE_integer("epochs", 120, "Epochs.", lower_bound=1)
    flags.DEFINE_integer("examples", 1000, "Points to train on; as many again to test.")
    flags.DEFINE_integer("num_neighbors", 100, "Dictionary entries.", lower_bound=2)
    flags.DEFINE_integer("frames", 30, "Frames of the animation.", lower_bound=2)
    flags.DEFINE_integer("seed", 0, "Seed of points and weights.")
    flags.DEFINE_string("output_dir", "runs", "Where results/ is written.")
    command.run(main)
