"""Trains the models of saved_models/, with their cards and recorded predictions.

    python -m experiments.serving.train_models --output_dir=.

The networks and the recipe are the demo's, on scikit-learn's digits. Writes, below
--output_dir, saved_models/<name>/1, a card and predictions beside it, and a record with the
accuracy in results/saved_models/. Models that are there are replaced.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from absl import flags, logging

import nsl_keras
from experiments.common import command, data, recipe, runs
from experiments.demo.networks import SETTINGS, build_model, compile_model
from experiments.demo.table import TITLES
from experiments.serving.card import model_card

FLAGS = flags.FLAGS
#: Names of the demo's networks that are served: one of each kind.
SERVED = ("static", "dynamic", "neighborhoods", "neighborhoods_film")
DATASET = "digits"
#: The first test images, whose logits are recorded.
RECORDED = 32


def folder_of(output: pathlib.Path, name: str) -> pathlib.Path:
    """The folder of a model's versions."""
    return output / "saved_models" / f"{DATASET}_{name}"


def trained(name: str, found: data.ImageData, epochs: int | None) -> tuple[Any, Any]:
    """A network of the demo, and the setting that it was trained with."""
    setting = SETTINGS[DATASET]
    if epochs:
        setting = dataclasses.replace(setting, epochs=epochs)
    keras.utils.set_random_seed(0)
    classes = len(found.class_names)
    model = build_model(name, setting, found.image_shape, classes, 0, synchronized=False)
    compile_model(model, setting.recipe(len(found.train.images)), jit_compile=False)
    model.fit(
        found.train.images,
        found.train.labels,
        batch_size=setting.batch_size,
        epochs=setting.epochs,
        verbose=FLAGS.verbose,
    )
    return model, setting


def main(_arguments: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # Else TensorFlow's notes drown the progress.
    output = pathlib.Path(FLAGS.output_dir).expanduser()
    found = data.load(DATASET)
    for name in FLAGS.model or SERVED:
        print(f"\n{TITLES[name]}", flush=True)
        model, setting = trained(name, found, FLAGS.epochs)
        folder = folder_of(output, name)
        shutil.rmtree(folder, ignore_errors=True)
        path = nsl_keras.export.save_model(
            model, folder, examples=found.test.images[:RECORDED]
        )
        record = {
            **recipe.first_record("serving.train_models", name, 0, model),
            "setting": dataclasses.asdict(setting),
            **found.counts,
            **recipe.evaluate(model, recipe.evaluated_parts(found)),
            "bytes": sum(file.stat().st_size for file in path.rglob("*")),
        }
        logits = model.predict(found.test.images[:RECORDED], verbose=0)
        runs.write_json(
            folder / "predictions.json",
            {"test_images": RECORDED, "logits": np.round(logits, 5).tolist()},
        )
        (folder / "README.md").write_text(model_card(DATASET, record, setting, found))
        runs.write_json(
            runs.results_folder(FLAGS.output_dir) / "saved_models" / f"{name}.json", record
        )
        print(f"Wrote {path}: test accuracy {100 * record['test_accuracy']:.2f} %")


if __name__ == "__main__":
    flags.DEFINE_multi_enum(
        "model", [], SERVED, "Models to train; all where none is given."
    )
    flags.DEFINE_integer("epochs", None, "Epochs, instead of the recipe's.", lower_bound=1)
    flags.DEFINE_integer("verbose", 0, "Progress: 0 silent, 1 a bar, 2 a line an epoch.")
    command.run(main)
