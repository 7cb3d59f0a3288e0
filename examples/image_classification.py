r"""Trains the image classifiers of Meta-Neighborhoods: Table 1 and Appendices A.3 to A.6.

Every method and seed sees the same batches, and is evaluated once, after the last step;
models with a dictionary before adaptation too.

    python -m examples.image_classification --iterations=300      # scikit-learn's digits
    python -m examples.image_classification --dataset=cifar10 --backbone=resnet29 \
        --data_dir=~/tensorflow_datasets --seeds=0,1,2 --nohold_out
    python -m examples.image_classification --experiment=A.5 --dataset=cifar10 \
        --method=neighborhoods --method=neighborhoods_3 --iterations=3000

--dataset is any image set of tensorflow-datasets, or one that
examples/image_folder_sets.py reads from a folder of images, --data_dir: cinic10, mnist_m,
pacs, tiny_imagenet. The recipe and what it leaves out: examples/neighborhood_recipe.py.

Finished runs are kept in --output_dir/results/image_classification_*.json and not run
again; an interrupted one goes on from its last saved state. `make results` prints the
tables. Trained models are kept in --model_dir; --figures draws those of the first seed,
besides the training. With --experiment=A.9 models are told coarse classes only.
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
import numpy as np
from absl import app, flags, logging

import nsl_keras
from examples import (
    image_classification_table,
    image_data,
    image_recipe,
    image_runs,
    neighborhood_methods,
    neighborhood_pictures,
    neighborhood_recipe,
)

FLAGS = flags.FLAGS
flags.DEFINE_enum(
    "experiment",
    "table_1",
    list(neighborhood_methods.EXPERIMENTS),
    "Table 1, or an appendix of the paper.",
)
flags.DEFINE_enum(
    "backbone", "convnet4", list(neighborhood_methods.BACKBONES), "Network before the head."
)
flags.DEFINE_integer(
    "num_neighbors", None, "Dictionary size S, instead of the published.", lower_bound=1
)
flags.DEFINE_float("temperature", None, "Temperature T, instead of the published 0.2.")
flags.DEFINE_float("dictionary_dropout", None, "Instead of the published 0.5.")
flags.DEFINE_bool("figures", False, "Draw the trained models of the first seed.")
flags.DEFINE_string("model_dir", "runs/models", "Where trained models are kept.")


def recipes_from_flags() -> dict[str, neighborhood_recipe.Recipe]:
    """The recipe for each optimizer: the same share of the published iterations."""
    published = {
        optimizer: neighborhood_recipe.published(FLAGS.dataset, optimizer)
        for optimizer in ("adamw", "sgd")
    }
    longest = published["adamw"].iterations
    iterations = image_runs.iterations_from_flags(longest)
    changes = image_runs.changes_from_flags(
        *("batch_size", "augmentation", "temperature", "dictionary_dropout")
    )
    changes["num_neighbors"] = FLAGS.num_neighbors or (
        neighborhood_methods.published_num_neighbors(FLAGS.dataset)
    )
    rate = image_runs.changes_from_flags("learning_rate")
    recipes = {}
    for optimizer, recipe in published.items():
        own = max(1, round(iterations * recipe.iterations / longest))
        # The flag is AdamW's rate; SGD's is a hundred times as large.
        own_rate = rate if optimizer == "adamw" else {}
        recipes[optimizer] = dataclasses.replace(recipe.scaled(own), **changes, **own_rate)
    return recipes


def with_coarse_labels(data: image_data.ImageData) -> image_data.ImageData:
    """The data with the coarse classes of A.9 as labels."""
    groups = neighborhood_methods.COARSE_CLASSES.get(FLAGS.dataset)
    if groups is None:
        raise ValueError(
            "`dataset` must be one with coarse classes for A.9: "
            f"{', '.join(neighborhood_methods.COARSE_CLASSES)}. "
            f"Received: dataset={FLAGS.dataset!r}"
        )
    coarse = np.zeros(len(data.class_names), "int64")
    for number, group in enumerate(groups):
        coarse[list(group)] = number
    parts = {
        part: image_data.Split(split.images, coarse[split.labels])
        for part in ("train", "validation", "test")
        for split in (getattr(data, part),)
    }
    names = ["/".join(data.class_names[fine] for fine in group) for group in groups]
    return dataclasses.replace(data, **parts, class_names=names)


def train(
    name: str,
    seed: int,
    recipes: dict[str, neighborhood_recipe.Recipe],
    data: image_data.ImageData,
    fine: image_data.ImageData,
    state: pathlib.Path,
) -> dict:
    """Trains one method with one seed, keeps the model, and returns its record."""
    keras.utils.set_random_seed(seed)
    method = neighborhood_methods.METHODS[name]
    recipe = recipes[method.optimizer]
    model = neighborhood_methods.build(
        method, FLAGS.backbone, data.image_shape, len(data.class_names), recipe, seed
    )
    neighborhood_recipe.compile_model(model, recipe, method.optimizer, jit_compile())
    record = image_runs.first_record("image_classification", name, seed, model)
    record["iterations"] = recipe.iterations
    batches = image_recipe.Batches(data.train, recipe, seed)
    record |= image_runs.train_and_evaluate(
        model, batches, recipe, state, image_runs.evaluated_parts(data)
    )
    if "diverged" in record:
        return record
    if isinstance(model, nsl_keras.MetaNeighborhoodModel):
        rates = [keras.ops.convert_to_numpy(rate) for rate in model.inner_rates]
        record["inner_rate"] = float(np.mean(np.concatenate([r.ravel() for r in rates])))
    if fine is not data:
        record["induction_accuracy"] = neighborhood_pictures.induction_accuracy(model, fine)
    path = model_path(name, seed, recipes["adamw"])
    path.parent.mkdir(parents=True, exist_ok=True)
    model.save(path)
    return record


def jit_compile() -> bool | str:
    """What the flag says; by default no XLA for TensorFlow on CPUs, where it is slower."""
    if FLAGS.jit_compile is not None:
        return FLAGS.jit_compile
    on_cpu = all(name.startswith("cpu") for name in keras.distribution.list_devices())
    return False if on_cpu and keras.backend.backend() == "tensorflow" else "auto"


def run_name(recipe: neighborhood_recipe.Recipe) -> str:
    """What the files of runs of the same setting begin with."""
    size = FLAGS.train_size or ("all" if FLAGS.hold_out else "everything")
    coarse = neighborhood_methods.EXPERIMENTS[FLAGS.experiment].coarse
    dataset = f"{FLAGS.dataset}_coarse" if coarse else FLAGS.dataset
    return f"image_classification_{FLAGS.backbone}_{dataset}_{size}_{recipe.iterations}"


def model_path(name: str, seed: int, recipe: neighborhood_recipe.Recipe) -> pathlib.Path:
    folder = pathlib.Path(FLAGS.model_dir).expanduser() / run_name(recipe)
    return folder / f"{name}_{seed}.keras"


def draw(data: image_data.ImageData, recipe: neighborhood_recipe.Recipe) -> None:
    """Draws the trained models of the first seed."""
    experiment = neighborhood_methods.EXPERIMENTS[FLAGS.experiment]
    seed = int(FLAGS.seeds[0])
    models = {
        name: keras.saving.load_model(path)
        for name in FLAGS.method or experiment.methods
        if (path := model_path(name, seed, recipe)).exists()
    }
    if not models:
        raise ValueError(
            "`figures` needs trained models of the first seed in `model_dir`: what is "
            f"finished is not run again. Received: model_dir={FLAGS.model_dir!r}, without "
            f"{run_name(recipe)}/*_{seed}.keras"
        )
    make = (
        neighborhood_pictures.of_subcategories
        if experiment.coarse
        else neighborhood_pictures.of_neighbors
    )
    folder = pathlib.Path(FLAGS.output_dir).expanduser() / "results" / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in make(models, data).items():
        path = folder / f"{FLAGS.backbone}_{FLAGS.dataset}_{name}.png"
        figure.savefig(path, dpi=110)
        print(f"Wrote {path}")


def load_data() -> image_data.ImageData:
    """The images, 32x32 as in the paper (A.1) but for digits and ImageNet."""
    published = {"digits": None, "imagenet": 64}
    size = FLAGS.image_size or published.get(FLAGS.dataset, 32)
    return image_runs.load_arrays(size)


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Unknown arguments: {arguments[1:]}")
    logging.set_verbosity(logging.ERROR)  # Else TensorFlow's notes drown the progress.
    experiment = neighborhood_methods.EXPERIMENTS[FLAGS.experiment]
    image_runs.check_methods(experiment.methods, FLAGS.experiment)
    recipes = recipes_from_flags()
    fine = load_data()
    if image_runs.wrote_data_file(fine):
        return
    data = with_coarse_labels(fine) if experiment.coarse else fine
    recipe = recipes["adamw"]
    sgd = ("iterations", "rate_drops", "learning_rate")
    setting = {
        "backbone": FLAGS.backbone,
        "dataset": FLAGS.dataset,
        **data.counts,
        "image_shape": data.image_shape,
        "classes": len(data.class_names),
        "recipe": dataclasses.asdict(recipe),
        "sgd": {name: getattr(recipes["sgd"], name) for name in sgd},
    }
    methods = FLAGS.method or experiment.methods
    records = image_runs.run_all(
        f"{run_name(recipe)}.json",
        setting,
        {name: experiment.methods[name].title for name in methods},
        lambda name, seed, state: train(name, seed, recipes, data, fine, state),
    )
    print(f"\n{image_classification_table.section(records.path, [FLAGS.experiment])}\n")
    print(f"Wrote {records.path}")
    if FLAGS.figures:
        draw(fine, recipe)


if __name__ == "__main__":
    app.run(main)
