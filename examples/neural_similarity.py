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
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from absl import app, flags, logging

from examples import (
    image_data,
    image_recipe,
    image_runs,
    image_stream,
    neural_similarity_table,
    similarity_methods,
)

FLAGS = flags.FLAGS
flags.DEFINE_enum("table", "4", sorted(similarity_methods.TABLES), "Table of the paper.")
flags.DEFINE_bool(
    "stream",
    False,
    "Read the images while training, for sets too large for the memory (ImageNet); "
    "evaluated on their validation images; 224 pixels by default.",
)
flags.DEFINE_enum("variant", "code", ["code", "paper"], "Which CNN-9: see backbones.cnn9.")
flags.DEFINE_enum(
    "schedule", None, sorted(image_recipe.RECIPES), "Instead of the table's: rate drops."
)
flags.DEFINE_float(
    "batch_normalization_momentum",
    None,
    "By default the published 0.999 for the published iterations, and 0.9 for fewer: "
    "moving statistics with 0.999 need thousands of steps.",
)

#: Images that are themselves only one way round.
WRITTEN = ("digits", "mnist")


def recipe_from_flags(table: similarity_methods.Table) -> image_recipe.Recipe:
    published = image_recipe.RECIPES[FLAGS.schedule or table.recipe]
    iterations = image_runs.iterations_from_flags(published.iterations)
    changes = image_runs.changes_from_flags(
        "batch_size", "learning_rate", "batch_normalization_momentum"
    )
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
    return image_runs.load_arrays(FLAGS.image_size)


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
    record = image_runs.first_record("neural_similarity", name, seed, model)
    batches: keras.utils.PyDataset
    if isinstance(data, image_stream.ImageStream):
        steps = image_recipe.chunk_steps(recipe.iterations)
        batches = image_stream.StreamedBatches(data, recipe.batch_size, steps, seed)
        evaluated = {"test": {"x": data.evaluation_batches(100)}}
    else:
        batches = image_recipe.Batches(data.train, recipe, seed)
        evaluated = image_runs.evaluated_parts(data)
    return record | image_runs.train_and_evaluate(model, batches, recipe, state, evaluated)


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
    image_runs.check_methods(table.methods, f"table {FLAGS.table}")
    recipe = recipe_from_flags(table)
    data = load_data()
    if isinstance(data, image_data.ImageData) and image_runs.wrote_data_file(data):
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
    records = image_runs.run_all(
        results_file(table, recipe),
        setting,
        {name: table.methods[name].title for name in FLAGS.method or table.methods},
        lambda name, seed, state: train(name, seed, table, recipe, data, state),
    )
    print(f"\n{neural_similarity_table.section(records.path, [FLAGS.table])}\n")
    print(f"Wrote {records.path}")


if __name__ == "__main__":
    app.run(main)
