"""What the examples that train image networks share: flags, images, and resumable runs."""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping

import keras
import numpy as np
from absl import flags

import nsl_keras
from examples import image_data, image_folder_sets, image_recipe, run_records

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("method", [], "Rows to train; all of the table by default.")
flags.DEFINE_list("seeds", ["0"], "Seeds, separated by commas.")
flags.DEFINE_string(
    "dataset", "digits", "digits, a set of image_folder_sets, or one of tfds."
)
flags.DEFINE_string("data_dir", None, "Folder of the set, or of prepared tfds copies.")
flags.DEFINE_string("data_file", None, "Images from an .npz file; --dataset names them.")
flags.DEFINE_string("write_data_file", None, "Write the images to such a file, and stop.")
flags.DEFINE_integer("train_size", None, "Number of training images.", lower_bound=1)
flags.DEFINE_bool("hold_out", True, "Keep the validation images out of training.")
flags.DEFINE_integer("image_size", None, "Make the images of so many pixels.")
flags.DEFINE_integer("iterations", None, "Training steps; drops in proportion.")
flags.DEFINE_float("budget", None, "The same as a fraction of the published iterations.")
flags.DEFINE_integer("batch_size", None, "Instead of the published 128.", lower_bound=1)
flags.DEFINE_float("learning_rate", None, "Instead of the published start rate.")
flags.DEFINE_enum(
    "augmentation",
    None,
    image_recipe.AUGMENTATIONS,
    "By default the published one, as far as the images allow it: mirror images of digits "
    "are no digits.",
)
flags.DEFINE_string("output_dir", "runs", "Where results/ is written.")
flags.DEFINE_string("state_dir", "runs/unfinished", "Where unfinished runs are kept.")
flags.DEFINE_bool("jit_compile", None, "Compile the steps with XLA; else what suits.")
flags.DEFINE_integer("verbose", 2, "Progress: 0 silent, 1 a bar, 2 a line a chunk.")


def iterations_from_flags(published: int) -> int:
    """The iterations that the flags ask for."""
    if FLAGS.iterations is not None and FLAGS.budget is not None:
        raise ValueError(
            "`iterations` and `budget` exclude each other. Received: "
            f"iterations={FLAGS.iterations}, budget={FLAGS.budget}"
        )
    iterations = FLAGS.iterations or round(published * (FLAGS.budget or 1))
    if iterations < 1:
        raise ValueError(
            "`iterations` and `budget` must leave at least one iteration. Received: "
            f"iterations={FLAGS.iterations}, budget={FLAGS.budget}"
        )
    return iterations


def changes_from_flags(*names: str) -> dict:
    """The flags among `names` that were given, as changes of a recipe."""
    return {
        name: getattr(FLAGS, name) for name in names if getattr(FLAGS, name) is not None
    }


def check_methods(known: Mapping, place: str) -> None:
    """Raises a `ValueError` for a method that a table has not."""
    for name in FLAGS.method:
        if name not in known:
            raise ValueError(
                f"`method` must be one of {', '.join(map(repr, known))} in {place}. "
                f"Received: method={name!r}"
            )


def load_arrays(image_size: int | None = None) -> image_data.ImageData:
    """The images that the flags name, of `image_size` pixels where it is given."""
    if FLAGS.data_file:
        data = image_data.load_file(FLAGS.data_file, FLAGS.train_size)
    else:
        # Folders hold images of any size, which are resized as they are read.
        size = image_size if FLAGS.dataset in image_folder_sets.READERS else None
        data = image_data.load(FLAGS.dataset, FLAGS.data_dir, FLAGS.train_size, size)
    if image_size and data.image_shape[:2] != (image_size, image_size):
        data = image_data.resized(data, image_size)
    if not FLAGS.hold_out:
        data = image_data.without_validation(data)
    return data


def wrote_data_file(data: image_data.ImageData) -> bool:
    """Writes the images to a file where a flag says so."""
    if FLAGS.write_data_file:
        image_data.save_file(data, FLAGS.write_data_file)
        print(f"Wrote {FLAGS.write_data_file}")
    return bool(FLAGS.write_data_file)


def first_record(module: str, name: str, seed: int, model: keras.Model) -> dict:
    """What is known of a run before it starts."""
    return {
        "method": name,
        "seed": seed,
        "parameters": sum(int(np.prod(v.shape)) for v in model.trainable_variables),
        "command": run_records.command(module),
        "versions": run_records.versions(),
        "devices": keras.distribution.list_devices(),
    }


def train_and_evaluate(
    model: keras.Model,
    batches: keras.utils.PyDataset,
    recipe: image_recipe.Schedule,
    state: pathlib.Path,
    evaluated: Mapping[str, dict],
) -> dict:
    """Trains with `image_recipe.fit`, then evaluates once; returns what to record.

    `evaluated` holds the arguments of `evaluate` for each part, a diverging run is not
    evaluated.
    """
    try:
        record = image_recipe.fit(model, batches, recipe, state, verbose=FLAGS.verbose)
    except nsl_keras.NonFiniteLossError as error:
        # A result too: the paper reports one for predictors of plain convolutions.
        return {"diverged": str(error)}
    for part, images in evaluated.items():
        found = model.evaluate(**images, verbose=0, return_dict=True)
        del found["loss"]
        record |= {f"{part}_{key}": float(value) for key, value in found.items()}
    return record


def evaluated_parts(data: image_data.ImageData) -> dict[str, dict]:
    """What to evaluate: validation images that took no part in training, and the test."""
    return {
        part: {"x": split.images, "y": split.labels, "batch_size": 100}
        for part, split in (("validation", data.validation), ("test", data.test))
        if len(split.images)
    }


def run_all(
    file_name: str,
    setting: dict,
    titles: Mapping[str, str],
    train: Callable[[str, int, pathlib.Path], dict],
) -> run_records.RunRecords:
    """Runs every method with every seed that is not in the results file yet.

    Args:
        file_name: Name of the results file, which runs of the same setting share.
        setting: What all of them have in common.
        titles: The methods, and what they are called.
        train: A function of method, seed and a folder for the unfinished run's state,
            which returns the record.
    """
    results = pathlib.Path(FLAGS.output_dir).expanduser() / "results"
    records = run_records.RunRecords(results / file_name, setting)
    # Two settings never go on with each other's states.
    digest = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:12]
    states = pathlib.Path(FLAGS.state_dir).expanduser() / digest
    for seed in map(int, FLAGS.seeds):
        for method, title in titles.items():
            run = f"{title}, seed {seed}"
            if records.holds(method, seed):
                print(f"\n{run}: finished before", flush=True)
                continue
            print(f"\n{run}", flush=True)
            state = states / f"{method}_{seed}"
            records.add(train(method, seed, state))
            shutil.rmtree(state)
    return records
