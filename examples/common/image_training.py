"""What the commands that train image networks share, their flags above all."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Iterable, Mapping

import keras
import numpy as np
from absl import flags

import nsl_keras
from examples.common import data, image_folders, recipe, runs

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("method", [], "Rows to train; all of the table by default.")
flags.DEFINE_list("seeds", ["0"], "Seeds, separated by commas.")
flags.DEFINE_string(
    "dataset", "digits", "digits, a set that comes as folders of images, or one of tfds."
)
flags.DEFINE_string("data_dir", None, "Folder of the set, or of prepared tfds copies.")
flags.DEFINE_string("data_file", None, "Images from an .npz file; --dataset names them.")
flags.DEFINE_string("write_data_file", None, "Write the images to such a file, and stop.")
flags.DEFINE_integer("train_size", None, "Number of training images.", lower_bound=1)
flags.DEFINE_bool("hold_out", True, "Keep the validation images out of training.")
flags.DEFINE_integer("image_size", None, "Make the images of so many pixels.")
flags.DEFINE_integer("steps", None, "Training steps; rate drops in proportion.")
flags.DEFINE_alias("iterations", "steps")
flags.DEFINE_float("budget", None, "The same as a fraction of the published steps.")
flags.DEFINE_integer("batch_size", None, "Instead of the published 128.", lower_bound=1)
flags.DEFINE_float("learning_rate", None, "Instead of the published start rate.")
flags.DEFINE_enum(
    "augmentation",
    None,
    recipe.AUGMENTATIONS,
    "By default the published one, as far as the images allow it: mirror images of digits "
    "are no digits.",
)
flags.DEFINE_string("output_dir", "runs", "Where results/ is written.")
flags.DEFINE_string("state_dir", "runs/unfinished", "Where unfinished runs are kept.")
flags.DEFINE_bool("jit_compile", None, "Compile the steps with XLA; else what suits.")
flags.DEFINE_integer("verbose", 2, "Progress: 0 silent, 1 a bar, 2 a line a chunk.")


def steps_from_flags(published: int) -> int:
    """The steps that the flags ask for."""
    if FLAGS.steps is not None and FLAGS.budget is not None:
        raise ValueError(
            "`steps` and `budget` exclude each other. Received: "
            f"steps={FLAGS.steps}, budget={FLAGS.budget}"
        )
    steps = FLAGS.steps or round(published * (FLAGS.budget or 1))
    if steps < 1:
        raise ValueError(
            "`steps` and `budget` must leave at least one step. Received: "
            f"steps={FLAGS.steps}, budget={FLAGS.budget}"
        )
    return steps


def changes_from_flags(*names: str) -> dict:
    """The flags among `names` that were given, as changes of a recipe."""
    return {
        name: getattr(FLAGS, name) for name in names if getattr(FLAGS, name) is not None
    }


def chosen_methods(known: Iterable[str], place: str) -> list[str]:
    """The methods that the flags ask for; a `ValueError` for one that a table has not."""
    known = list(known)
    for name in FLAGS.method:
        if name not in known:
            raise ValueError(
                f"`method` must be one of {', '.join(map(repr, known))} in {place}. "
                f"Received: method={name!r}"
            )
    return FLAGS.method or known


def load_arrays(image_size: int | None = None) -> data.ImageData:
    """The images that the flags name, of `image_size` pixels where it is given."""
    if FLAGS.data_file:
        found = data.load_file(FLAGS.data_file, FLAGS.train_size)
    else:
        # Folders hold images of any size, which are resized as they are read.
        size = image_size if FLAGS.dataset in image_folders.READERS else None
        found = data.load(FLAGS.dataset, FLAGS.data_dir, FLAGS.train_size, size)
    if image_size and found.image_shape[:2] != (image_size, image_size):
        found = data.resized(found, image_size)
    return found if FLAGS.hold_out else data.without_validation(found)


def wrote_data_file(found: data.ImageData) -> bool:
    """Writes the images to a file where a flag says so."""
    if FLAGS.write_data_file:
        data.save_file(found, FLAGS.write_data_file)
        print(f"Wrote {FLAGS.write_data_file}")
    return bool(FLAGS.write_data_file)


def setting_of(found: data.ImageData, trained: recipe.Recipe, **others: object) -> dict:
    """What all runs of a command have in common."""
    return {
        **others,
        "dataset": FLAGS.dataset,
        **found.counts,
        "image_shape": found.image_shape,
        "classes": len(found.class_names),
        "recipe": dataclasses.asdict(trained),
    }


def setting_name(network: str, dataset: str, trained: recipe.Recipe) -> str:
    """The name of the folder of a setting's runs."""
    size = FLAGS.train_size or ("all" if FLAGS.hold_out else "everything")
    return f"{network}_{dataset}_{size}_{trained.steps}"


def first_record(module: str, name: str, seed: int, model: keras.Model) -> dict:
    """What is known of a run before it starts."""
    return {
        "method": name,
        "seed": seed,
        "parameters": sum(int(np.prod(v.shape)) for v in model.trainable_variables),
        "command": runs.command(module),
        "versions": runs.versions(),
        "devices": keras.distribution.list_devices(),
    }


def train_and_evaluate(
    model: keras.Model,
    batches: keras.utils.PyDataset,
    trained: recipe.Recipe,
    state: pathlib.Path,
    evaluated: Mapping[str, dict],
) -> dict:
    """Trains with `recipe.fit`, then evaluates once, and deletes the unfinished state.

    `evaluated` holds the arguments of `evaluate` for each part. A diverging run is not
    evaluated. Returns what to record.
    """
    try:
        record = recipe.fit(model, batches, trained, state, verbose=FLAGS.verbose)
    except nsl_keras.NonFiniteLossError as error:
        # A result too: the paper reports one for predictors of plain convolutions.
        record, evaluated = {"diverged": str(error)}, {}
    for part, images in evaluated.items():
        found = model.evaluate(**images, verbose=0, return_dict=True)
        del found["loss"]
        record |= {f"{part}_{key}": float(value) for key, value in found.items()}
    shutil.rmtree(state, ignore_errors=True)
    return record


def evaluated_parts(found: data.ImageData) -> dict[str, dict]:
    """What to evaluate: validation images that took no part in training, and the test."""
    return {
        part: {"x": split.images, "y": split.labels, "batch_size": 100}
        for part, split in (("validation", found.validation), ("test", found.test))
        if len(split.images)
    }
