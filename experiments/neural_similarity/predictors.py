"""What predictors of dynamic similarities give, and what they cost.

    python -m experiments.neural_similarity.predictors --data_dir=DIR --data_file=FILE.npz
    python -m experiments.neural_similarity.predictors --costs

The narrow CNN and the small ResNet of `experiments.no_harm`, with this package's batch
norms, are trained on 5,000 images by its recipe: plain, and with every predictor below in
all convolutions. The images are of 40 training classes of CIFAR-FS, and of CIFAR-10; both
are judged by validation images, which come from the training images. Predictors are
compared with the plain network of the same images, order and start weights. With --costs
nothing is trained: the time of a step is taken beside the plain network's.

Each run is a line of --output_dir/results/predictors.jsonl and is not made twice.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
from typing import Any

import keras
import numpy as np
from absl import flags
from scipy import stats

from experiments.common import command, data, runs, tables
from experiments.common.convolutions import SIMILARITIES, depthwise
from experiments.no_harm import comparison
from experiments.no_harm.comparison import LAST_EPOCHS, Comparison
from experiments.no_harm.data import Images, draw
from experiments.no_harm.methods import PLAIN, PLAIN_METHOD, Method, with_similarity
from experiments.no_harm.networks import BATCH_NORMS, NETWORKS, WIDTHS
from experiments.no_harm.training import Cell, Setting
from experiments.speed import timing
from nsl_keras.predictors import SimilarityPredictor

FLAGS = flags.FLAGS

PLACE = "predictors.jsonl"
#: The name, in that file, of the records of times.
COSTS = "costs"
#: The images of CIFAR-10 that those for training are drawn from.
POOL = 10_000
TRAINING_IMAGES = 5_000
#: Images of a step whose time is taken.
BATCH = 64
CLASSES = 40
DATASETS = {"cifar_fs": "CIFAR-FS, 40 classes", "cifar10": "CIFAR-10"}
NAMES = ("narrow_cnn", "small_resnet")


PREDICTORS: dict[str, Any] = {
    "kernel-sized output": SimilarityPredictor(downsampling=1),
    "1x1 output": SimilarityPredictor(downsampling=1, output_kernel_size=1),
    "blocks": SimilarityPredictor(downsampling=2),
    "blocks, 1x1 output": SimilarityPredictor(downsampling=2, output_kernel_size=1),
    # Where maps are at least 16 pixels wide.
    "blocks by size": lambda filters: SimilarityPredictor(
        downsampling=2 if filters < WIDTHS[-1] else 1
    ),
    "depthwise": SimilarityPredictor(depthwise),
}
OWN = {
    f"{name} {kind}": Method(f"{name} {kind}", with_similarity(similarity, predictor))
    for name, similarity in SIMILARITIES.items()
    for kind, predictor in PREDICTORS.items()
}
METHODS = {PLAIN: PLAIN_METHOD} | OWN


@functools.cache
def read(dataset: str) -> data.ImageData:
    if dataset == "cifar_fs":
        return data.load_file(FLAGS.data_file)
    if FLAGS.cifar10_file:
        return data.load_file(FLAGS.cifar10_file, POOL)
    return data.load(dataset, FLAGS.data_dir, POOL)


def images(dataset: str, found: data.ImageData, seed: int) -> Images:
    """Returns training and validation images of a seed, apart from each other."""
    if dataset == "cifar10":
        parts = draw(found.train, TRAINING_IMAGES, seed), found.validation.take(2_000)
        return Images(*parts, len(found.class_names))
    rng = np.random.default_rng(seed)
    classes = np.sort(rng.permutation(np.unique(found.train.labels))[:CLASSES])
    members = rng.permutation(np.flatnonzero(np.isin(found.train.labels, classes)))
    chosen = data.Split(
        found.train.images[members], np.searchsorted(classes, found.train.labels[members])
    )
    count = min(TRAINING_IMAGES, len(members) * 4 // 5)
    rest = data.Split(chosen.images[count:], chosen.labels[count:])
    return Images(chosen.take(count), rest, len(classes))


def step_time(network: str, name: str) -> dict[str, float]:
    make = functools.partial(
        NETWORKS[network].make, (32, 32, 3), 10, batch_norm=BATCH_NORMS["unbiased"]
    )
    models = [method.make(make, make()) for method in (METHODS[PLAIN], METHODS[name])]
    for model in models:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
    rng = np.random.default_rng(0)
    batch = rng.random((BATCH, 32, 32, 3), "float32"), rng.integers(0, 10, BATCH)
    return timing.step_time_ratio(models[1], models[0], batch)


def compare(found: list[dict]) -> dict[str, list[Comparison]]:
    """Returns every method beside the plain network, in each of its cells."""
    made = comparison.compare(found, OWN, DATASETS, NAMES)
    by_name = {name: [cell for cell in made if cell.method == name] for name in OWN}
    return {name: cells for name, cells in by_name.items() if cells}


def pooled(cells: list[Comparison]) -> tuple[float, float]:
    """The mean of the cells' mean differences, and half its 95 % interval.

    The interval takes differences of seeds to scatter alike in all cells.
    """
    found = [np.array(each.differences(LAST_EPOCHS)) for each in cells]
    mean = float(np.mean([each.mean() for each in found]))
    freedom = sum(len(each) - 1 for each in found)
    if not freedom:
        return mean, math.inf
    variance = sum(((each - each.mean()) ** 2).sum() for each in found) / freedom
    error = math.sqrt(sum(variance / len(each) for each in found)) / len(found)
    return mean, float(stats.t.ppf(0.975, freedom)) * error


def costs(results: pathlib.Path) -> list[dict]:
    return runs.RunRecords(results / PLACE, COSTS).runs


def table(comparisons: dict[str, list[Comparison]], timed: list[dict]) -> str:
    times = {(run["method"], run["network"]): run["step_time"] for run in timed}
    places = [(dataset, network) for dataset in DATASETS for network in NAMES]
    columns = [f"{DATASETS[d]}, {NETWORKS[n].title}" for d, n in places]
    titles = [f"step time, {NETWORKS[network].title}" for network in NAMES]
    rows = []
    for name, cells in comparisons.items():
        by_place = {(cell.dataset, cell.network): cell for cell in cells}
        gain = tables.spread(*pooled(cells), "seeds", sum(len(c.seeds) for c in cells), "+")
        shown = [
            by_place[place].interval(LAST_EPOCHS) if place in by_place else "not run"
            for place in places
        ]
        measured = [times.get((name, network)) for network in NAMES]
        own = [f"{each['median']:.2f}x" if each else "not run" for each in measured]
        seeds = ", ".join(str(len(cell.seeds)) for cell in cells)
        rows.append([name, gain, *own, *shown, seeds])
    return tables.markdown(["predictor", "mean", *titles, *columns, "seeds"], rows)


def section(results: pathlib.Path) -> str:
    found = runs.RunRecords(results / PLACE).runs
    setting = Setting()
    backends = ", ".join(sorted({run["versions"]["backend"] for run in found}))
    return (
        "## Neural Similarity Learning: what predictors cost\n\n"
        f"{tables.commands(found)}: {TRAINING_IMAGES:,} training images, "
        f"{setting.epochs} epochs of Adam at {setting.learning_rate:g}, batches of "
        f"{setting.batch_size}. Validation accuracy less the plain network's in points, "
        f"paired by seed, the mean of the last {LAST_EPOCHS} epochs ± half its 95 % "
        "interval (over all, differences of seeds are taken to scatter alike in all "
        f"cells); {backends}. The defaults are DNS kernel-sized output and UNS blocks. "
        "Times of a step over the plain "
        f"network's, on two cores without XLA, {BATCH} random images: "
        f"{tables.commands(costs(results))}."
        f"\n\n{table(compare(found), costs(results))}"
    )


def main(_arguments: list[str]) -> None:
    results = runs.results_folder(FLAGS.output_dir)
    path = results / PLACE
    setting = Setting(batch_norm="unbiased")
    held = dataclasses.asdict(setting) | {"pool": POOL, "training_images": TRAINING_IMAGES}
    records = runs.RunRecords(path, setting=held)
    networks = FLAGS.network or NAMES
    own = runs.about("neural_similarity.predictors")

    def run(dataset: str, network: str, name: str, seed: int) -> dict:
        found = images(dataset, read(dataset), seed)
        record = Cell(setting, found, NETWORKS[network], seed).run(METHODS[name])
        keras.utils.clear_session()
        names = {"dataset": dataset, "network": network, "method": name, "seed": seed}
        return names | record | own

    def measure(network: str, name: str) -> dict:
        names = {"network": network, "method": name}
        return names | {"step_time": step_time(network, name)} | own

    if FLAGS.costs:
        pairs = itertools.product(networks, FLAGS.method or OWN)
        runs.run_all(runs.RunRecords(path, COSTS, {"batch": BATCH}), pairs, measure)
    else:
        names = FLAGS.dataset or DATASETS, networks, FLAGS.method or METHODS
        runs.run_all(records, runs.every(*names, FLAGS.seeds), run)
    print(f"\n{table(compare(records.runs), costs(results))}")


if __name__ == "__main__":
    flags.DEFINE_string("data_dir", None, "The folder of CIFAR-10, as tfds prepares it.")
    flags.DEFINE_string("data_file", None, "CIFAR-FS, as for experiments.few_shot.")
    flags.DEFINE_string("cifar10_file", None, "CIFAR-10 from a file, without --data_dir.")
    flags.DEFINE_bool("costs", False, "Measure the times of a step.")
    flags.DEFINE_multi_enum("dataset", [], list(DATASETS), "Image sets; all by default.")
    flags.DEFINE_multi_enum("network", [], list(NAMES), "Networks; both by default.")
    flags.DEFINE_multi_enum("method", [], list(METHODS), "Methods; all by default.")
    flags.DEFINE_list("seeds", [str(seed) for seed in range(5)], "Seeds, a run each.")
    command.run(main)
