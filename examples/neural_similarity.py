r"""Trains the image networks of Neural Similarity Learning: Tables 1 to 5 and 8.

A row of a table is a method; every method and seed sees the same batches, and is
evaluated once, after the last step.

    python -m examples.neural_similarity --iterations=300       # scikit-learn's digits
    python -m examples.neural_similarity --table=4 --dataset=cifar10 \
        --data_dir=~/tensorflow_datasets --seeds=0,1,2 --nohold_out
    python -m examples.neural_similarity --table=4 --method=cnn --method=static_dns \
        --dataset=cifar10 --train_size=10000 --iterations=2000

Finished runs are kept in --output_dir/results/neural_similarity_*.json and not run again;
an interrupted one goes on from its last saved state. `make results` prints the tables.
Runs with TensorFlow, and with JAX (KERAS_BACKEND=jax) where no TensorFlow is installed:
tensorflow-datasets needs TensorFlow, so write the images to a file once, where there is
one, with --write_data_file=images.npz, and read them with --data_file=images.npz.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from absl import app, flags, logging

import nsl_keras
from examples import (
    image_data,
    image_recipe,
    image_stream,
    neural_similarity_table,
    run_records,
    similarity_methods,
)

FLAGS = flags.FLAGS
flags.DEFINE_enum("table", "4", sorted(similarity_methods.TABLES), "Table of the paper.")
flags.DEFINE_multi_string("method", [], "Rows to train; all of the table by default.")
flags.DEFINE_list("seeds", ["0"], "Seeds, separated by commas.")
flags.DEFINE_string("dataset", "digits", "digits, or any image set of tfds.")
flags.DEFINE_string("data_dir", None, "Folder of prepared tensorflow-datasets copies.")
flags.DEFINE_string("data_file", None, "Images from an .npz file; --dataset names them.")
flags.DEFINE_string("write_data_file", None, "Write the images to such a file, and stop.")
flags.DEFINE_integer("train_size", None, "Number of training images.", lower_bound=1)
flags.DEFINE_bool("hold_out", True, "Keep the validation images out of training.")
flags.DEFINE_integer("image_size", None, "Make the images of so many pixels; streams: 224.")
flags.DEFINE_bool(
    "stream",
    False,
    "Read the images while training, for sets too large for the memory (ImageNet); "
    "evaluated on their validation images.",
)
flags.DEFINE_enum("variant", "code", ["code", "paper"], "Which CNN-9: see backbones.cnn9.")
flags.DEFINE_enum(
    "schedule", None, sorted(image_recipe.RECIPES), "Instead of the table's: rate drops."
)
flags.DEFINE_integer("iterations", None, "Training steps; drops in proportion.")
flags.DEFINE_float("budget", None, "The same as a fraction of the published iterations.")
flags.DEFINE_integer("batch_size", None, "Instead of the published 128.", lower_bound=1)
flags.DEFINE_float("learning_rate", None, "Instead of the published start rate.")
flags.DEFINE_float(
    "batch_normalization_momentum",
    None,
    "By default the published 0.999 for the published iterations, and 0.9 for fewer: "
    "moving statistics with 0.999 need thousands of steps.",
)
flags.DEFINE_enum(
    "augmentation",
    None,
    image_recipe.AUGMENTATIONS,
    "By default the published one; none for digits, whose mirror images are not digits.",
)
flags.DEFINE_string("output_dir", "runs", "Where results/ is written.")
flags.DEFINE_string("state_dir", "runs/unfinished", "Where unfinished runs are kept.")
flags.DEFINE_bool("jit_compile", None, "Compile the steps with XLA; None: Keras decides.")
flags.DEFINE_integer("verbose", 2, "Progress: 0 silent, 1 a bar, 2 a line a chunk.")

#: Images that are themselves only one way round.
WRITTEN = ("digits", "mnist")


def recipe_from_flags(table: similarity_methods.Table) -> image_recipe.Recipe:
    published = image_recipe.RECIPES[FLAGS.schedule or table.recipe]
    if FLAGS.iterations is not None and FLAGS.budget is not None:
        raise ValueError(
            "`iterations` and `budget` exclude each other. Received: "
            f"iterations={FLAGS.iterations}, budget={FLAGS.budget}"
        )
    iterations = FLAGS.iterations or round(published.iterations * (FLAGS.budget or 1))
    if iterations < 1:
        raise ValueError(
            "`iterations` and `budget` must leave at least one iteration. Received: "
            f"iterations={FLAGS.iterations}, budget={FLAGS.budget}"
        )
    changes = {
        name: getattr(FLAGS, name)
        for name in ("batch_size", "learning_rate", "batch_normalization_momentum")
        if getattr(FLAGS, name) is not None
    }
    if iterations < published.iterations:
        changes.setdefault("batch_normalization_momentum", 0.9)
    if FLAGS.augmentation or FLAGS.dataset in WRITTEN:
        changes["augmentation"] = FLAGS.augmentation or "none"
    return dataclasses.replace(published.scaled(iterations), **changes)


def load_data() -> image_data.ImageData | image_stream.ImageStream:
    if FLAGS.stream:
        for name in ("data_file", "write_data_file", "train_size"):
            if getattr(FLAGS, name):
                raise ValueError(
                    f"`{name}` and `stream` exclude each other. Received: "
                    f"{name}={getattr(FLAGS, name)!r}, stream=True"
                )
        return image_stream.load(FLAGS.dataset, FLAGS.data_dir, FLAGS.image_size or 224)
    if FLAGS.data_file:
        data = image_data.load_file(FLAGS.data_file, FLAGS.train_size)
    else:
        data = image_data.load(FLAGS.dataset, FLAGS.data_dir, FLAGS.train_size)
    if FLAGS.image_size:
        data = image_data.resized(data, FLAGS.image_size)
    if not FLAGS.hold_out:
        data = image_data.without_validation(data)
    return data


def train(
    name: str,
    seed: int,
    table: similarity_methods.Table,
    recipe: image_recipe.Recipe,
    data: image_data.ImageData | image_stream.ImageStream,
    state: pathlib.Path,
) -> dict:
    """Trains one method with one seed, and returns its record."""
    keras.utils.set_random_seed(seed)
    backbone = similarity_methods.build(
        table.network,
        table.methods[name],
        data.image_shape,
        len(data.class_names),
        recipe.batch_normalization_momentum,
        **({"variant": FLAGS.variant} if table.network == "cnn9" else {}),
    )
    jit_compile = "auto" if FLAGS.jit_compile is None else FLAGS.jit_compile
    model = image_recipe.trainable(backbone, recipe, jit_compile)
    record = {
        "method": name,
        "seed": seed,
        "parameters": sum(int(np.prod(v.shape)) for v in model.trainable_variables),
        "command": run_records.command("neural_similarity"),
        "versions": run_records.versions(),
        "devices": keras.distribution.list_devices(),
    }
    batches: keras.utils.PyDataset
    if isinstance(data, image_stream.ImageStream):
        steps = image_recipe.chunk_steps(recipe.iterations)
        batches = image_stream.StreamedBatches(data, recipe.batch_size, steps, seed)
        evaluated = {"test": {"x": data.evaluation_batches(100)}}
    else:
        batches = image_recipe.Batches(data.train, recipe, seed)
        evaluated = {
            part: {"x": split.images, "y": split.labels, "batch_size": 100}
            for part, split in (("validation", data.validation), ("test", data.test))
            if len(split.images)
        }
    try:
        record |= image_recipe.fit(model, batches, recipe, state, verbose=FLAGS.verbose)
    except nsl_keras.NonFiniteLossError as error:
        # A result too: the paper reports one for predictors of plain convolutions.
        return {**record, "diverged": str(error)}
    for part, images in evaluated.items():
        found = model.evaluate(**images, verbose=0, return_dict=True)
        del found["loss"]
        record |= {f"{part}_{key}": float(value) for key, value in found.items()}
    return record


def results_file(table: similarity_methods.Table, recipe: image_recipe.Recipe) -> str:
    """The name of the file that runs of the same setting share, whatever the table."""
    size = FLAGS.train_size or ("all" if FLAGS.hold_out else "everything")
    network = table.network + ("_paper" if FLAGS.variant == "paper" else "")
    return f"neural_similarity_{network}_{FLAGS.dataset}_{size}_{recipe.iterations}.json"


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Unknown arguments: {arguments[1:]}")
    logging.set_verbosity(logging.ERROR)  # Else TensorFlow's notes drown the progress.
    table = similarity_methods.TABLES[FLAGS.table]
    for name in FLAGS.method:
        if name not in table.methods:
            raise ValueError(
                f"`method` must be one of {', '.join(map(repr, table.methods))} in "
                f"table {FLAGS.table}. Received: method={name!r}"
            )
    recipe = recipe_from_flags(table)
    data = load_data()
    if FLAGS.write_data_file:
        image_data.save_file(data, FLAGS.write_data_file)
        print(f"Wrote {FLAGS.write_data_file}")
        return
    setting = {
        "network": table.network,
        "variant": FLAGS.variant if table.network == "cnn9" else None,
        "dataset": FLAGS.dataset,
        **data.counts,
        "image_shape": data.image_shape,
        "classes": len(data.class_names),
        "recipe": dataclasses.asdict(recipe),
    }
    results = pathlib.Path(FLAGS.output_dir).expanduser() / "results"
    records = run_records.RunRecords(results / results_file(table, recipe), setting)
    # Two settings never go on with each other's states.
    digest = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:12]
    states = pathlib.Path(FLAGS.state_dir).expanduser() / digest
    for seed in map(int, FLAGS.seeds):
        for method in FLAGS.method or table.methods:
            run = f"{table.methods[method].title}, seed {seed}"
            if records.holds(method, seed):
                print(f"\n{run}: finished before", flush=True)
                continue
            print(f"\n{run}", flush=True)
            state = states / f"{method}_{seed}"
            records.add(train(method, seed, table, recipe, data, state))
            shutil.rmtree(state)
    print(f"\n{neural_similarity_table.section(records.path, [FLAGS.table])}\n")
    print(f"Wrote {records.path}")


if __name__ == "__main__":
    app.run(main)
