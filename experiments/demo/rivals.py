r"""Classifies the demo's images without a network: nearest neighbors, SVM, perceptron.

    python -m experiments.demo.rivals --output_dir=.

The same training and test images as `experiments.demo`. The perceptron has as many
parameters as linear features with Meta-Neighborhoods on digits. Nothing is tuned.
"""

import pathlib
from collections.abc import Callable
from typing import Any

from absl import flags
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.svm import SVC

from experiments.common import command, data, runs
from experiments.demo import table

FLAGS = flags.FLAGS

RIVALS: dict[str, Callable[[int], Any]] = {
    "1 nearest neighbor of the pixels": lambda seed: KNeighborsClassifier(1),
    "3 nearest": lambda seed: KNeighborsClassifier(3),
    "5 nearest, weighted by distance": lambda seed: KNeighborsClassifier(
        5, weights="distance"
    ),
    "SVM, RBF kernel": lambda seed: SVC(),
    "perceptron, 590 hidden units": lambda seed: MLPClassifier(
        590, max_iter=500, random_state=seed
    ),
}


def main(_arguments: list[str]) -> None:
    found = data.load(FLAGS.dataset, FLAGS.data_dir)
    x, test_x = (
        each.images.reshape(len(each.images), -1) for each in (found.train, found.test)
    )
    path = pathlib.Path(runs.results_folder(FLAGS.output_dir)) / table.PLACE
    records = runs.RunRecords(path, f"{FLAGS.dataset}_rivals", found.counts)

    def run(name: str, seed: int) -> dict:
        model = RIVALS[name](seed).fit(x, found.train.labels)
        accuracy = float(model.score(test_x, found.test.labels))
        about = runs.about("demo.rivals")
        return {**about, "method": name, "seed": seed, "test_accuracy": accuracy}

    runs.run_all(records, runs.every(RIVALS, range(3)), run)
    print(f"\n{table.table([], records.runs)}\n\nWrote {path}")


if __name__ == "__main__":
    flags.DEFINE_string("dataset", "digits", "Images to learn.")
    flags.DEFINE_string("data_dir", None, "Folder of prepared tensorflow-datasets copies.")
    command.run(main)
