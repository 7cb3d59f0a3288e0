r"""Classifies the demo's images without a network: nearest neighbors, SVM, perceptron.

    python -m experiments.demo.rivals --output_dir=.

The same training and test images as `experiments.demo`. The perceptron has as many
parameters as linear features with Meta-Neighborhoods on digits. Nothing is tuned.
"""

from absl import flags

from experiments.common import command, data, runs
from experiments.demo import table

FLAGS = flags.FLAGS


def main(_arguments: list[str]) -> None:
    found = data.load(FLAGS.dataset, FLAGS.data_dir)
    x, test_x = (
        each.images.reshape(len(each.images), -1) for each in (found.train, found.test)
    )
    path = runs.results_folder(FLAGS.output_dir) / table.PLACE
    records = runs.RunRecords(path, f"{FLAGS.dataset}_rivals", found.counts)

    def run(name: str, seed: int) -> dict:
        model = table.RIVALS[name](seed).fit(x, found.train.labels)
        accuracy = float(model.score(test_x, found.test.labels))
        about = runs.about("demo.rivals")
        return {**about, "method": name, "seed": seed, "test_accuracy": accuracy}

    runs.run_all(records, runs.every(table.RIVALS, range(3)), run)
    print(f"\n{table.table([], records.runs)}\n\nWrote {path}")


if __name__ == "__main__":
    flags.DEFINE_string("dataset", "digits", "Images to learn.")
    flags.DEFINE_string("data_dir", None, "Folder of prepared tensorflow-datasets copies.")
    command.run(main)
