r"""Trains the image classifiers of Meta-Neighborhoods: Table 1 and Appendices A.3 to A.6.

Every method and seed sees the same batches, and is evaluated once, after the last step;
models with a dictionary before adaptation too.

    python -m experiments.image_classification --steps=300      # scikit-learn's digits
    python -m experiments.image_classification --dataset=cifar10 --backbone=resnet29 \
        --data_dir=~/tensorflow_datasets --seeds=0,1,2 --nohold_out
    python -m experiments.image_classification --experiment=A.5 --dataset=cifar10 \
        --method=neighborhoods --method=neighborhoods_3 --steps=3000

--dataset is any image set of tensorflow-datasets, or one that
experiments/common/image_folders.py reads from a folder of images, --data_dir: cinic10,
mnist_m, pacs, tiny_imagenet. The recipe and what it leaves out: methods.py.

Finished runs are kept in --output_dir/results/image_classification.jsonl and are not run
again. An interrupted run goes on from its last saved state. --output_dir=. adds to the
results of this repository; `python -m experiments.tables` makes their tables. Trained
models are in --model_dir; --figures draws those of the first seed. With --experiment=A.9
models are told coarse classes only.

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
import numpy as np
from absl import flags, logging

import nsl_keras
from experiments.common import (
    command,
    data,
    image_training,
    pictures,
    recipe,
    runs,
    strategies,
    tables,
)
from experiments.image_classification import methods, table
from nsl_keras.training import files

FLAGS = flags.FLAGS
flags.DEFINE_enum(
    "experiment", "table_1", list(methods.EXPERIMENTS), "Table 1, or an appendix."
)
flags.DEFINE_enum(
    "backbone", "convnet4", list(methods.BACKBONES), "Network before the head."
)
flags.DEFINE_integer(
    "num_neighbors", None, "Dictionary size S, instead of the published.", lower_bound=1
)
flags.DEFINE_float("temperature", 0.2, "Temperature T; 0.2 is the published.")
flags.DEFINE_float("dictionary_dropout", 0.5, "Share left out; 0.5 is the published.")
flags.DEFINE_bool("figures", False, "Draw the trained models of the first seed.")
flags.DEFINE_string("model_dir", "runs/models", "Where trained models are kept.")


def recipes_from_flags(train_examples: int) -> dict[str, recipe.Recipe]:
    """The recipe for each optimizer: the same share of the published steps."""
    published = {
        optimizer: methods.published(FLAGS.dataset, optimizer)
        for optimizer in ("adamw", "nesterov")
    }
    longest = published["adamw"].steps
    steps = image_training.steps_from_flags(
        longest, train_examples, FLAGS.batch_size or published["adamw"].batch_size
    )
    changes = image_training.recipe_changes_from_flags()
    changes |= image_training.changes_from_flags("augmentation")
    batch = image_training.changes_from_flags("batch_size", "augmentation")
    recipes = {}
    for optimizer, each in published.items():
        own = max(1, round(steps * each.steps / longest))
        # The other flags are for what AdamW trains; the rows of SGD are SGD's.
        own_changes = changes if optimizer == "adamw" else batch
        recipes[optimizer] = dataclasses.replace(each.scaled(own), **own_changes)
    return recipes


def dictionary_from_flags() -> dict:
    """The setting's dictionary; experiments take shares of its size and temperature."""
    return {
        "num_neighbors": FLAGS.num_neighbors
        or methods.published_num_neighbors(FLAGS.dataset),
        "temperature": FLAGS.temperature,
        "dropout": FLAGS.dictionary_dropout,
    }


def with_coarse_labels(found: data.ImageData) -> data.ImageData:
    """The data with the coarse classes of A.9 as labels."""
    groups = methods.COARSE_CLASSES.get(FLAGS.dataset)
    if groups is None:
        raise ValueError(
            "`dataset` must be one with coarse classes for A.9: "
            f"{', '.join(methods.COARSE_CLASSES)}. "
            f"Received: dataset={FLAGS.dataset!r}"
        )
    coarse = np.zeros(len(found.class_names), "int64")
    for number, group in enumerate(groups):
        coarse[list(group)] = number
    parts = {
        part: data.Split(split.images, coarse[split.labels])
        for part in ("train", "validation", "test")
        for split in (getattr(found, part),)
    }
    names = ["/".join(found.class_names[fine] for fine in group) for group in groups]
    return dataclasses.replace(found, **parts, class_names=names)


def train(
    name: str,
    seed: int,
    rate: float | None,
    state: pathlib.Path,
    setting: dict,
    recipes: dict[str, recipe.Recipe],
    found: data.ImageData,
    fine: data.ImageData,
    models: pathlib.Path,
    trial: bool = False,
) -> dict:
    """Trains one method with one seed, keeps the model, and returns its record."""
    keras.utils.set_random_seed(seed)
    trained = recipes[methods.METHODS[name].optimizer]
    trained = image_training.recipe_of_run(trained, rate, trial)
    model = make_model(name, seed, setting, trained, found)
    record = image_training.first_record("image_classification", name, seed, model)
    record["steps"] = trained.steps
    network = strategies.network_of(model)
    record["multiply_adds"] = methods.multiply_adds(network)
    if rate is not None:
        record["learning_rate"] = rate
    batches = image_training.make_batches(found.train, trained, seed)
    record |= image_training.train_and_evaluate(
        model,
        batches,
        trained,
        state,
        image_training.evaluated_parts(found, trial),
    )
    if "diverged" in record or trial:
        return record
    if isinstance(model, nsl_keras.MetaNeighborhoodModel):
        rates = [keras.ops.convert_to_numpy(rate) for rate in model.inner_rates]
        record["inner_rate"] = float(np.mean(np.concatenate([r.ravel() for r in rates])))
    if fine is not found:
        record["induction_accuracy"] = pictures.induction_accuracy(model, fine)
    if strategies.is_first_worker():
        with files.replacing(models / f"{name}_{seed}.keras") as scratch:
            network.save(scratch)
    if FLAGS.step_times:
        plain = make_model(methods.BASELINE, seed, setting, trained, found)
        record["step_time"] = image_training.step_time_ratio(model, plain, batches)
    return record


def make_model(
    name: str, seed: int, setting: dict, trained: recipe.Recipe, found: data.ImageData
) -> keras.Model:
    """The compiled model of a row."""
    with strategies.strategy().scope():
        model = methods.build(
            methods.METHODS[name],
            FLAGS.backbone,
            found.image_shape,
            len(found.class_names),
            setting["dictionary"],
            seed,
            setting["filters"],
        )
        return methods.compile_model(model, trained, jit_compile())


def jit_compile() -> bool | str:
    """What the flag says; by default no XLA for TensorFlow on CPUs, where it is slower."""
    if FLAGS.jit_compile is not None:
        return FLAGS.jit_compile
    on_cpu = all(name.startswith("cpu") for name in keras.distribution.list_devices())
    return False if on_cpu and keras.backend.backend() == "tensorflow" else "auto"


def draw(names: list[str], found: data.ImageData, models: pathlib.Path) -> None:
    """Draws the trained models of the first seed."""
    seed = FLAGS.seeds[0]
    trained = {
        name: keras.saving.load_model(path)
        for name in names
        if (path := models / f"{name}_{seed}.keras").exists()
    }
    if not trained:
        raise ValueError(
            "`figures` needs trained models of the first seed in `model_dir`: what is "
            f"finished is not run again. Received: model_dir={FLAGS.model_dir!r}, without "
            f"{models.name}/*_{seed}.keras"
        )
    coarse = methods.EXPERIMENTS[FLAGS.experiment].coarse
    make = pictures.of_subcategories if coarse else pictures.of_neighbors
    prefix = f"{FLAGS.backbone}_{FLAGS.dataset}"
    runs.write_figures(
        runs.results_folder(FLAGS.output_dir) / "figures",
        {f"{prefix}_{name}": figure for name, figure in make(trained, found).items()},
    )


def load_data() -> data.ImageData:
    """The images, 32x32 as in the paper (A.1) but for digits and ImageNet."""
    published = {"digits": None, "imagenet": 64}
    return image_training.load_arrays(FLAGS.image_size or published.get(FLAGS.dataset, 32))


def main(_arguments: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # Else TensorFlow's notes drown the progress.
    strategies.strategy()
    image_training.use_dtype_from_flags()
    experiment = methods.EXPERIMENTS[FLAGS.experiment]
    names = image_training.chosen_methods(experiment.names, FLAGS.experiment)
    fine = load_data()
    if image_training.wrote_data_file(fine):
        return
    recipes = recipes_from_flags(image_training.training_examples(fine))
    found = with_coarse_labels(fine) if experiment.coarse else fine
    sgd = ("steps", "rate_drops", "learning_rate")
    setting = image_training.setting_of(
        found,
        recipes["adamw"],
        backbone=FLAGS.backbone,
        coarse=experiment.coarse,
        dictionary=dictionary_from_flags(),
        sgd={name: getattr(recipes["nesterov"], name) for name in sgd},
    )
    dataset = f"{FLAGS.dataset}_coarse" if experiment.coarse else FLAGS.dataset
    place = image_training.setting_name(FLAGS.backbone, dataset, recipes["adamw"])
    # Of a setting, as the records are: another one's would take their place.
    models = runs.states_folder(f"{FLAGS.model_dir}/{place}", setting)
    if not FLAGS.tune:
        files.require_room(models)
    made = image_training.make_runs(
        runs.results_folder(FLAGS.output_dir) / "image_classification.jsonl",
        place,
        setting,
        {name: methods.METHODS[name].title for name in names},
        functools.partial(
            train,
            setting=setting,
            recipes=recipes,
            found=found,
            fine=fine,
            models=models,
        ),
    )
    if FLAGS.tune:
        print(f"\n{tables.trials(made.runs)}\n\nWrote {made.path}")
        return
    print(f"\n{table.section(made, [FLAGS.experiment])}\n")
    print(f"Wrote {made.path}")
    if FLAGS.figures:
        draw(names, fine, models)


if __name__ == "__main__":
    command.run(main)
