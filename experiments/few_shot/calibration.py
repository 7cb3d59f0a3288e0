"""Are the probabilities of adapted classifiers as large as their accuracy?

    python -m experiments.few_shot.calibration --data_file=FILE.npz --data_dir=FOLDER

Classifiers are adapted to a few examples of new classes, on features of a fixed network:
digits 7 to 9 after a CNN has learned 0 to 6; test classes of the data file after a CNN has
learned its training classes; noisy photographs of `experiments.pretrained` on
EfficientNet-Lite0.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from absl import flags

import nsl_keras
from experiments.common import command, data, runs, tables
from experiments.pretrained import __main__ as pretrained
from nsl_keras import few_shot

FLAGS = flags.FLAGS

PLACE = "calibration.jsonl"
BINS = 10
Features = tuple[np.ndarray, np.ndarray]


def _features(network: keras.Model, images: np.ndarray) -> np.ndarray:
    cut = keras.Model(network.inputs, network.layers[-1].input)
    return cut.predict(images, batch_size=256, verbose=0)


def _train(network: keras.Model, train: Features, epochs: int) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(keras.optimizers.Adam(2e-3), loss)
    network.fit(*train, epochs=epochs, batch_size=64, verbose=0)


def digits() -> Features:
    found = data.load("digits")
    images, labels = (
        np.concatenate([getattr(part, name) for part in (found.train, found.test)])
        for name in ("images", "labels")
    )
    layers = keras.layers.Conv2D(32, 3, activation="relu"), keras.layers.Flatten()
    inputs, head = keras.Input(images.shape[1:]), keras.layers.Dense(7)
    network, known = keras.Sequential([inputs, *layers, head]), labels < 7
    _train(network, (images[known], labels[known]), 20)
    return _features(network, images[~known]), labels[~known]


def cifar_fs() -> Features:
    held = dict(np.load(FLAGS.data_file))
    labels = np.unique(held["train_labels"], return_inverse=True)[1]
    backbone = nsl_keras.backbones.convnet4((32, 32, 3), filters=(32, 32, 64, 64))
    outputs = keras.layers.Dense(int(labels.max()) + 1)(backbone.outputs[0])
    network = keras.Model(backbone.inputs, outputs)
    _train(network, (held["train_images"] / 255, labels), 12)
    return _features(network, held["test_images"] / 255), held["test_labels"]


def photos() -> Features:
    images, labels, _ = pretrained.domain("noise")
    return pretrained.backbone().predict(images, verbose=0), labels


#: Titles, classes of an episode, the features, and the flag that has their place.
SETS: dict[str, tuple[str, int, Callable[[], Features], str | None]] = {
    "digits": ("digits", 3, digits, None),
    "cifar_fs": ("classes of CIFAR-100", 5, cifar_fs, "data_file"),
    "photos": ("noisy photographs", 5, photos, "data_dir"),
}


def learners(features: int, ways: int) -> dict[str, Callable[[], Any]]:
    inputs = keras.Input((features,))
    identity = keras.Model(inputs, keras.layers.Identity()(inputs))
    dense = keras.Model(inputs, keras.layers.Dense(ways)(inputs))
    kinds = few_shot.NearestCentroid, few_shot.ProtoNet, few_shot.NeighborhoodLearner
    made = {kind.__name__: functools.partial(kind, identity, ways) for kind in kinds}
    return made | {"Finetuner": functools.partial(few_shot.Finetuner, dense, ways)}


def calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The expected calibration error, over ten intervals of the largest probability."""
    certainty = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    bins = np.minimum((certainty * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, certainty - right, BINS)
    return float(np.sum(np.abs(gaps)) / len(labels))


def measured(make: Callable[[], Any], sampler: Any, draws: int) -> dict[str, float]:
    logits, labels, temperatures = [], [], []
    for number in range(draws):
        episode = sampler.episodes(1, start=number)
        support, given, queries, wanted = (each[0] for each in episode)
        model = make().adapt(support, given)
        logits.append(model.predict(queries, verbose=0))
        temperatures.append(np.full((len(wanted), 1), model.layers[-1].temperature))
        labels.append(wanted)
    calibrated, labels = np.concatenate(logits), np.concatenate(labels)
    plain = calibrated * np.concatenate(temperatures)
    pair = map(keras.ops.softmax, (plain, calibrated))
    before, after = map(keras.ops.convert_to_numpy, pair)
    return {
        "accuracy": float(np.mean(after.argmax(axis=1) == labels)),
        "error_before": calibration_error(before, labels),
        "error": calibration_error(after, labels),
    }


def measure(name: str, records: runs.RunRecords) -> None:
    """Makes the records of a data set."""
    _, ways, load, _ = SETS[name]
    keras.utils.set_random_seed(0)
    features, labels = load()
    made = learners(features.shape[1], ways)

    def run(place: str, method: str, shots: int) -> dict:
        sampler = few_shot.EpisodeSampler(features, labels, ways, shots, 15, scale=1.0)
        own = {"data": place, "method": method, "shots": shots}
        about = runs.about("few_shot.calibration")
        return own | about | measured(made[method], sampler, FLAGS.draws)

    keys = [(name, method, int(shots)) for shots in FLAGS.shots for method in made]
    runs.run_all(records, keys, run)


def table(found: list[dict]) -> str:
    """A row for each kind of classes, a column for each learner."""
    rows: dict[str, list[str]] = {}
    for run in found:
        title, ways, *_ = SETS[run["data"]]
        kind = f"{title}, {ways} classes, {run['shots']} per class"
        errors = f"{run['error_before']:.2f}, {run['error']:.2f}"
        cells = rows.setdefault(kind, [kind])
        cells.append(f"{100 * run['accuracy']:.1f}; {errors}")
    learners = dict.fromkeys(run["method"] for run in found)
    return tables.markdown(["new classes", *learners], rows.values())


def section(results: pathlib.Path) -> str:
    found = runs.RunRecords(results / PLACE).runs
    return (
        f"## Calibration of adapted classifiers\n\n{tables.commands(found)}: "
        "accuracy in % and expected calibration error (ten bins) of "
        "what `adapt` returns, before and after its temperature, over "
        f"{found[0]['setting']['draws']} draws of classes and examples.\n\n{table(found)}"
    )


def main(_arguments: list[str]) -> None:
    results = runs.results_folder(FLAGS.output_dir)
    records = runs.RunRecords(results / PLACE, setting={"draws": FLAGS.draws})
    for name, (*_, flag) in SETS.items():
        if flag is None or FLAGS[flag].value:
            measure(name, records)
    print(table(records.runs))


if __name__ == "__main__":
    flags.DEFINE_string("data_file", None, "An .npz file of few-shot data.")
    flags.DEFINE_string("data_dir", None, "Folder with photo/<class>/.")
    flags.DEFINE_list("shots", ["1", "5"], "Examples per class.")
    flags.DEFINE_integer("draws", 20, "Draws of classes and examples.", lower_bound=1)
    command.run(main)
