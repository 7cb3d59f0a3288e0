"""How far batch norms' moving statistics lag, by the window of their average.

    python -m experiments.moving_statistics --data_file=FILE.npz

Trains small networks with Adam(1e-3) on 20 training classes of a few-shot image set, and
averages the statistics of their batches in several ways beside each other: from zero and
one with a fixed momentum, as Keras does, and over a window that grows with the examples so
far, as `nsl_keras.layers.BatchNormalization` does. At some steps the network is evaluated
on a fifth of the images, which it was not trained on, with each of the averages, and with
statistics that are estimated anew.

Writes a line a run to --output_dir/results/moving_statistics.jsonl. Runs that are there are
not made again; `python -m experiments.tables` makes their table.
"""

from __future__ import annotations

import os
import pathlib
import statistics
from collections.abc import Iterator
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import keras
import numpy as np
from absl import flags

from experiments.common import command, data, runs, tables
from experiments.few_shot import data as few_shot_data
from experiments.neural_similarity.predictor_cost import parts
from experiments.no_harm.evaluation import accuracy
from experiments.no_harm.networks import NETWORKS, MakeLayer, Network, Tensor

FLAGS = flags.FLAGS

#: The file of the records, in results/.
PLACE = "moving_statistics.jsonl"
CLASSES = 20


class Window(NamedTuple):
    """Over how many examples an average is, until its momentum's own window is shorter.

    Args:
        parts: The parts that the examples so far are cut into, of which the window is one.
        shortest: How many examples it has at least.
    """

    parts: int
    shortest: int = 0

    @property
    def title(self) -> str:
        least = f", at least {self.shortest}" if self.shortest else ""
        return f"1/{self.parts} of the examples{least}"


#: That of `nsl_keras.layers.BatchNormalization`.
OURS = Window(512, 32)
WINDOWS = [
    *map(Window, (4, 16, 64, 512)),
    *(Window(parts, 32) for parts in (64, 256)),
    OURS,
    Window(1024, 32),
    Window(512, 128),
]
#: Averages by momentum and window; those without one are Keras's.
AVERAGES = [(momentum, window) for momentum in (0.9, 0.99) for window in (None, *WINDOWS)]
ANEW = "anew"


def perceptron(x: Tensor, convolution: MakeLayer, batch_norm: MakeLayer) -> Tensor:
    """Two hidden layers, whose statistics are of one number an example."""
    layers = keras.layers
    x = layers.Flatten()(layers.AveragePooling2D(2)(x))
    for number in range(2):
        x = layers.Dense(128, name=f"hidden_{number}")(x)
        x = layers.ReLU()(batch_norm(name=f"hidden_{number}_normalization")(x))
    return x


TRAINED = {
    "narrow_cnn": NETWORKS["narrow_cnn"],
    "small_resnet": NETWORKS["small_resnet"],
    "perceptron": Network("perceptron", perceptron),
}
#: Networks and their batch sizes: small batches are the hardest for vectors.
SETTINGS = (
    *(("narrow_cnn", 32), ("small_resnet", 32)),
    *(("perceptron", 32), ("perceptron", 8)),
)


def of_batch_alone(momentum: float = 0.0, **options: str) -> keras.layers.Layer:
    """A batch norm whose moving statistics are those of the last batch."""
    return keras.layers.BatchNormalization(momentum=0.0, **options)


def weight(momentum: float, window: Window | None, seen: int, count: int) -> float:
    """The weight of a batch of `count` examples after `seen` others."""
    if window is None:
        return 1 - momentum
    length = max(seen / window.parts, min(seen, window.shortest))
    return max(1 - momentum, count / (count + length))


class Average:
    """An average of the statistics of batches.

    Args:
        momentum: The momentum that it ends with.
        window: What it is over before; `None` for a fixed momentum.
        start: What a fixed momentum starts from.
    """

    def __init__(
        self, momentum: float, window: Window | None, start: list[np.ndarray]
    ) -> None:
        self.momentum, self.window = momentum, window
        self.values, self.seen = start, 0

    def update(self, of_batch: list[np.ndarray], count: int) -> None:
        """Takes in the statistics of the next batch."""
        part = weight(self.momentum, self.window, self.seen, count)
        self.seen += count
        self.values = [
            (1 - part) * old + part * new
            for old, new in zip(self.values, of_batch, strict=True)
        ]


def batches(count: int, batch_size: int, seed: int) -> Iterator[np.ndarray]:
    """Numbers of images, epoch after epoch, in whole batches."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(count)
        for first in range(0, count - batch_size + 1, batch_size):
            yield order[first : first + batch_size]


def estimated_anew(
    model: keras.Model, images: np.ndarray, batch_size: int
) -> list[np.ndarray]:
    """The mean statistics of all batches."""
    stored, found = model.non_trainable_weights, []
    for first in range(0, len(images), batch_size):
        with keras.StatelessScope() as scope:
            model(images[first : first + batch_size], training=True)
        values = map(scope.get_current_value, stored)
        found.append([keras.ops.convert_to_numpy(value) for value in values])
    return [np.mean(values, axis=0) for values in zip(*found, strict=True)]


def one_run(network: str, batch_size: int, seed: int, found: data.Split) -> dict:
    """Trains a network, and evaluates it with every average at some of the steps."""
    images, labels, other_images, other_labels = parts(found, CLASSES, seed)
    validation = data.Split(other_images, other_labels)
    keras.utils.set_random_seed(seed)
    model = TRAINED[network].make(images.shape[1:], CLASSES, batch_norm=of_batch_alone)
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    stored = model.non_trainable_weights  # Those of the last batch alone.
    start = [keras.ops.convert_to_numpy(each) for each in stored]
    averages = [Average(*each, start) for each in AVERAGES]
    steps = sorted(map(int, FLAGS.steps))
    accuracies: dict[str, dict[str, float]] = {}
    for step, chosen in enumerate(batches(len(images), batch_size, seed), start=1):
        model.train_on_batch(images[chosen], labels[chosen])
        of_batch = [keras.ops.convert_to_numpy(each) for each in stored]
        for average in averages:
            average.update(of_batch, batch_size)
        if step in steps:
            tried = {ANEW: estimated_anew(model, images, batch_size)} | {
                name_of(each.momentum, each.window): each.values for each in averages
            }
            accuracies[str(step)] = {}
            for name, values in tried.items():
                for variable, value in zip(stored, values, strict=True):
                    variable.assign(value)
                accuracies[str(step)][name] = round(accuracy(model, validation), 4)
        if step == steps[-1]:
            break
    return {
        **{"network": network, "batch_size": batch_size, "seed": seed},
        "command": runs.command("moving_statistics"),
        "versions": runs.versions(),
        "accuracies": accuracies,
    }


def name_of(momentum: float, window: Window | None) -> str:
    """The name of an average in records."""
    return " ".join(map(str, (momentum, *(window or ()))))


def lag(run: dict, momentum: float, window: Window | None) -> float:
    """Accuracy below that with statistics estimated anew, in points: the mean of steps."""
    return 100 * statistics.mean(
        of_step[ANEW] - of_step[name_of(momentum, window)]
        for of_step in run["accuracies"].values()
    )


def table(found: list[dict]) -> str:
    """One line an average, one column a network and batch size."""
    columns = ["momentum", "window"]
    cells = []
    for network, batch_size in SETTINGS:
        own = [r for r in found if (r["network"], r["batch_size"]) == (network, batch_size)]
        if own:
            columns.append(f"{TRAINED[network].title}, batches of {batch_size}")
            cells.append(own)
    rows = [
        [
            str(momentum),
            window.title if window else "Keras's",
            *(tables.mean(lag(run, momentum, window) for run in own) for own in cells),
        ]
        for momentum, window in AVERAGES
    ]
    return tables.markdown(columns, rows)


def section(results: pathlib.Path) -> str:
    """The section of results/README.md."""
    title = "## Moving statistics of batch norms: how far they lag"
    records = runs.RunRecords(results / PLACE)
    found = records.runs
    if not found:
        return f"{title}\n\nNot run."
    steps = ", ".join(found[0]["accuracies"])
    seeds = ", ".join(map(str, sorted({run["seed"] for run in found})))
    return (
        f"{title}\n\n{tables.commands(found)}: accuracy on validation images with each "
        "average, in points below that with statistics estimated anew, the mean over steps "
        f"{steps} of Adam at 0.001. {records.setting['classes']} training classes of a "
        f"few-shot image set, seeds {seeds}: mean ± standard deviation over them."
        f"\n\n{table(found)}"
    )


def _define_flags() -> None:
    flags.DEFINE_string("data_file", None, "The images, as for experiments.few_shot.")
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds, a run each.")
    flags.DEFINE_list(
        "steps",
        ["10", "20", "40", "80", "160", "320", "640", "1280"],
        "Evaluated after these.",
    )
    flags.DEFINE_string("output_dir", "runs/moving_statistics", "Where to write.")
    flags.mark_flag_as_required("data_file")


def main(_arguments: list[str]) -> None:
    found = few_shot_data.load("images", data_file=FLAGS.data_file)
    setting = {"classes": CLASSES, "steps": FLAGS.steps, "data_file": found.fingerprint}
    records = runs.RunRecords(
        runs.results_folder(FLAGS.output_dir) / PLACE, setting=setting
    )
    titles: dict[runs.Key, str] = {
        (network, size, seed): f"{TRAINED[network].title}, batches of {size}, seed {seed}"
        for seed in map(int, FLAGS.seeds)
        for network, size in SETTINGS
    }
    runs.run_all(records, titles, lambda *key: one_run(*key, found.train))
    print(f"\n{table(records.runs)}")


if __name__ == "__main__":
    _define_flags()
    command.run(main)
