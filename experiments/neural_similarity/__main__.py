r"""Trains the image networks of Neural Similarity Learning: Tables 1 to 5 and 8.

Predictors are the authors', unless --predictors=default asks for the package's own. Table
"cost" is none of the paper's: it sets dynamic similarities beside plain networks with as
many parameters, and with as many multiply-adds.

A row of a table is a method; every method and seed sees the same batches, and is
evaluated once, after the last step.

    python -m experiments.neural_similarity --steps=300       # scikit-learn's digits
    python -m experiments.neural_similarity --table=4 --dataset=cifar10 \
        --data_dir=~/tensorflow_datasets --seeds=0,1,2 --nohold_out
    python -m experiments.neural_similarity --table=4 --method=cnn --method=static_dns \
        --dataset=cifar10 --train_size=10000 --steps=2000
    python -m experiments.neural_similarity --table=cost --filters=16,32,64 \
        --dataset=cifar10 --train_size=10000 --epochs=30 --augmentation=pad_crop_flip \
        --input=standardized --optimizer=adam --cosine_decay --step_times \
        --seeds=0,1,2 --tune    # the same with --tuned then trains at the best rates

Finished runs are kept in --output_dir/results/neural_similarity.jsonl and are not run
again. An interrupted run goes on from its last saved state. --output_dir=. adds to the
results of this repository; `python -m experiments.tables` makes their tables.

It runs under TensorFlow and, where no TensorFlow is installed, under JAX
(KERAS_BACKEND=jax). tensorflow-datasets needs TensorFlow: write the images to a file once
with --write_data_file=images.npz, and read them with --data_file=images.npz.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from absl import flags, logging

from experiments.common import (
    command,
    data,
    image_training,
    recipe,
    runs,
    strategies,
    tables,
)
from experiments.neural_similarity import methods, stream, table

FLAGS = flags.FLAGS
flags.DEFINE_enum("table", "4", sorted(methods.TABLES), "Table of the paper.")
flags.DEFINE_bool(
    "stream",
    False,
    "Read the images while training, for sets too large for the memory (ImageNet); "
    "evaluated on their validation images; 224 pixels by default.",
)
flags.DEFINE_enum("variant", "code", ["code", "paper"], "Which CNN-9: see backbones.cnn9.")
flags.DEFINE_enum(
    "schedule", None, sorted(methods.RECIPES), "Instead of the table's: rate drops."
)
flags.DEFINE_enum(
    "predictors",
    None,
    ["published", "default"],
    "Predictors as the authors have them, or the package's own; by default the table's.",
)
flags.DEFINE_float(
    "batch_normalization_momentum",
    None,
    "By default the published 0.999 for the published steps, and 0.9 for fewer: "
    "moving statistics with 0.999 need thousands of steps.",
)

#: Images that are themselves only one way round.
WRITTEN = ("digits", "mnist")


def recipe_from_flags(
    chosen: methods.Table, train_examples: int
) -> tuple[recipe.Recipe, float]:
    """The recipe, and the momentum of batch norms that suits its length."""
    published = methods.RECIPES[FLAGS.schedule or chosen.recipe]
    steps = image_training.steps_from_flags(
        published.steps, train_examples, FLAGS.batch_size or published.batch_size
    )
    changes = image_training.recipe_changes_from_flags()
    if FLAGS.augmentation or FLAGS.dataset in WRITTEN:
        changes["augmentation"] = FLAGS.augmentation or "none"
    momentum = FLAGS.batch_normalization_momentum
    if momentum is None:
        momentum = 0.9 if steps < published.steps else 0.999
    return dataclasses.replace(published.scaled(steps), **changes), momentum


def load_data() -> data.ImageData | stream.ImageStream:
    if FLAGS.stream:
        # Streamed images have their own range and augmentation, and no validation part.
        for name in (
            *("data_file", "write_data_file", "train_size"),
            *("input", "augmentation", "tune", "tuned"),
        ):
            if getattr(FLAGS, name):
                raise ValueError(
                    f"`{name}` and `stream` exclude each other. Received: "
                    f"{name}={getattr(FLAGS, name)!r}, stream=True"
                )
        return stream.load(FLAGS.dataset, FLAGS.data_dir, FLAGS.image_size or 224)
    return image_training.load_arrays(FLAGS.image_size)


def train(
    name: str,
    seed: int,
    rate: float | None,
    state: pathlib.Path,
    setting: dict,
    trained: recipe.Recipe,
    found: data.ImageData | stream.ImageStream,
    trial: bool = False,
) -> dict:
    """Trains one method with one seed, and returns its record."""
    keras.utils.set_random_seed(seed)
    trained = image_training.recipe_of_run(trained, rate, trial)
    backbone, model = make_models(name, setting, trained, found)
    record = image_training.first_record("neural_similarity", name, seed, model)
    record["multiply_adds"] = methods.size_of(backbone)["multiply_adds"]
    if rate is not None:
        record["learning_rate"] = rate
    batches: keras.utils.PyDataset
    if isinstance(found, stream.ImageStream):
        chunk = recipe.chunk_steps(trained.steps, FLAGS.save_every)
        batches = stream.StreamedBatches(found, trained.batch_size, chunk, seed)
        evaluated = {"test": {"x": found.evaluation_batches(100)}}
    else:
        batches = image_training.make_batches(found.train, trained, seed)
        evaluated = image_training.evaluated_parts(found, trial)
    record |= image_training.train_and_evaluate(
        model,
        batches,
        trained,
        state,
        evaluated,
    )
    if FLAGS.step_times and not trial:
        baseline = methods.TABLES[FLAGS.table].baseline
        _, plain = make_models(baseline, setting, trained, found)
        record["step_time"] = image_training.step_time_ratio(model, plain, batches)
    return record


def make_models(
    name: str,
    setting: dict,
    trained: recipe.Recipe,
    found: data.ImageData | stream.ImageStream,
) -> tuple[keras.Model, keras.Model]:
    """The network of a row, and the compiled model from images."""
    chosen = methods.TABLES[FLAGS.table]
    options: dict = {"variant": FLAGS.variant} if chosen.network == "cnn9" else {}
    if setting["filters"] is not None:
        options["filters"] = setting["filters"]
    jit_compile = "auto" if FLAGS.jit_compile is None else FLAGS.jit_compile
    with strategies.strategy().scope():
        backbone = methods.build(
            chosen.network,
            chosen.methods[name],
            found.image_shape,
            len(found.class_names),
            setting["batch_normalization_momentum"],
            setting["predictors"] == "published",
            **options,
        )
        return backbone, methods.trainable(backbone, trained, jit_compile)


def main(_arguments: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # Else TensorFlow's notes drown the progress.
    strategies.strategy()
    image_training.use_dtype_from_flags()
    chosen = methods.TABLES[FLAGS.table]
    names = image_training.chosen_methods(chosen.methods, f"table {FLAGS.table}")
    found = load_data()
    if isinstance(found, data.ImageData) and image_training.wrote_data_file(found):
        return
    trained, momentum = recipe_from_flags(chosen, image_training.training_examples(found))
    predictors = FLAGS.predictors or chosen.predictors
    setting = image_training.setting_of(
        found,
        trained,
        network=chosen.network,
        variant=FLAGS.variant if chosen.network == "cnn9" else None,
        batch_normalization_momentum=momentum,
        predictors=predictors,
    )
    network = chosen.network + ("_paper" if FLAGS.variant == "paper" else "")
    network += "" if predictors == "published" else "_default"
    place = image_training.setting_name(network, FLAGS.dataset, trained)
    made = image_training.make_runs(
        runs.results_folder(FLAGS.output_dir) / "neural_similarity.jsonl",
        place,
        setting,
        {name: chosen.methods[name].title for name in names},
        functools.partial(train, setting=setting, trained=trained, found=found),
    )
    if FLAGS.tune:
        print(f"\n{tables.trials(made.runs)}\n")
    else:
        print(f"\n{table.section(made, [FLAGS.table])}\n")
    print(f"Wrote {made.path}")


if __name__ == "__main__":
    command.run(main)
