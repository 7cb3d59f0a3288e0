"""Does a method of this package, used naively, make a first training worse?

    python -m experiments.no_harm                       # trains all that is not trained yet
    python -m experiments.no_harm --dataset=digits --network=narrow_cnn --seeds=0

Every method has every default, and is compared with the plain network of the same images,
order and, where it has them, start weights. What converts a trained network is compared
with that network trained on for as long. The records have further seeds where the 95 %
interval of a method in a cell was wider than two points to either side. With
--batch_norm=unbiased the networks have this package's batch norms: a matrix of its own,
which shares the networks that have none. Processes may share a matrix, each with image sets
or networks that no other has.
"""

import dataclasses
import itertools
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import tensorflow as tf
from absl import flags

from experiments.common import command, runs
from experiments.no_harm import report
from experiments.no_harm.data import DATASETS
from experiments.no_harm.methods import METHODS
from experiments.no_harm.networks import BATCH_NORMS, NETWORKS
from experiments.no_harm.training import Setting, run_cell

FLAGS = flags.FLAGS
flags.DEFINE_multi_enum("dataset", [], list(DATASETS), "Image sets; all if none is given.")
flags.DEFINE_multi_enum("network", [], list(NETWORKS), "Networks; all if none is given.")
flags.DEFINE_multi_enum("method", [], list(METHODS), "Methods; all if none is given.")
flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds, separated by commas.")
flags.DEFINE_enum("batch_norm", "keras", list(BATCH_NORMS), "Batch norms of the networks.")
flags.DEFINE_string(
    "data_dir",
    os.environ.get("NSL_KERAS_DATA_DIR"),
    "Folder of tfds' prepared copies; by default NSL_KERAS_DATA_DIR, or tfds' own.",
)


def main(_arguments: list[str]) -> None:
    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    setting = Setting(batch_norm=FLAGS.batch_norm)
    path = runs.results_folder(FLAGS.output_dir) / report.PLACE
    records = runs.RunRecords(path, setting.batch_norm, dataclasses.asdict(setting))
    seeds = [int(seed) for seed in FLAGS.seeds]
    datasets = [name for name in DATASETS if name in (FLAGS.dataset or DATASETS)]
    networks = [name for name in NETWORKS if name in (FLAGS.network or NETWORKS)]
    if setting.batch_norm != "keras":
        networks = [name for name in networks if NETWORKS[name].batch_norm]
    if not networks:
        raise ValueError(
            "`network` must have batch norms with --batch_norm=unbiased. "
            f"Received: network={FLAGS.network}"
        )
    methods = FLAGS.method or METHODS
    for cell in itertools.product(seeds, datasets, networks):
        run_cell(records, setting, cell, methods, FLAGS.data_dir)
    print(f"\nRuns are in {records.path}.")


if __name__ == "__main__":
    command.run(main)
