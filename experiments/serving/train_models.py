"""Trains the models of saved_models/, with their cards and recorded predictions.

    python -m experiments.serving.train_models --output_dir=.

The networks and the recipe are the demo's, on scikit-learn's digits. Writes, below
--output_dir, saved_models/<name>/1, a card and predictions beside it, and a record with the
accuracy in results/saved_models.jsonl. Models that are there are replaced.
"""

import dataclasses
import json
import pathlib
import shutil

import keras
import numpy as np
from absl import flags

import nsl_keras
from experiments.common import command, data, recipe, runs
from experiments.demo.networks import SETTINGS, Setting, build_model, compile_model
from experiments.demo.table import TITLES

FLAGS = flags.FLAGS
#: Names of the demo's networks that are served: one of each kind.
SERVED = ("static", "dynamic", "neighborhoods", "neighborhoods_film")
DATASET = "digits"
#: The first test images, whose logits are recorded.
RECORDED = 32


def model_card(dataset: str, record: dict, setting: Setting, found: data.ImageData) -> str:
    """The card of one of the demo's models, from the record of its run."""
    name = record["method"]
    size = ", ".join(map(str, found.image_shape))
    signatures = ["`serving_default` returns the logits"]
    entries = ""
    if "neighborhoods" in name:
        signatures += [
            "`unadapted` those of the head before it adapts",
            "`features` the features",
            "`neighbors` the dictionary entries with the largest attention",
        ]
        entries = f", {setting.num_neighbors} dictionary entries"
    return f"""# {TITLES[name]} on {dataset}

* **Input** `inputs`: float32 images of shape (batch, {size}), values in [0, 1].
* **Output**: logits of {len(found.class_names)} classes, {", ".join(found.class_names)}.
* **Signatures**: {"; ".join(signatures)}.
* **Data**: {dataset}; {len(found.train.images):,} images for training,
  {len(found.validation.images):,} for choices, {len(found.test.images):,} for the test.
* **Recipe**: {setting.epochs} epochs in batches of {setting.batch_size}, AdamW at
  {setting.learning_rate:g}{entries}; seed {record["seed"]};
  {record["parameters"]:,} parameters.
* **Test accuracy**: {100 * record["test_accuracy"]:.2f} % on images that took no part in
  training or choices.
* **Written by** `{record["command"]}`.
* **Limits**: made to show the method on small images of one kind. It gives every image a
  class, even one that shows none of them or has NaN in it.
"""


def main(_arguments: list[str]) -> None:
    output = pathlib.Path(FLAGS.output_dir).expanduser()
    found, setting = data.load(DATASET), SETTINGS[DATASET]
    for name in SERVED:
        print(f"\n{TITLES[name]}", flush=True)
        keras.utils.set_random_seed(0)
        model = build_model(name, setting, found.image_shape, len(found.class_names), 0)
        compile_model(model, setting.recipe(name, len(found.train.images)))
        options = {"batch_size": setting.batch_size, "epochs": setting.epochs}
        model.fit(found.train.images, found.train.labels, verbose=0, **options)
        folder = output / "saved_models" / f"{DATASET}_{name}"
        shutil.rmtree(folder, ignore_errors=True)
        path = folder / "1"
        nsl_keras.export.save_model(model, path, examples=found.test.images[:RECORDED])
        record = {
            **recipe.first_record("serving.train_models", name, 0, model),
            "setting": dataclasses.asdict(setting),
            **found.counts,
            **recipe.evaluate(model, recipe.evaluated_parts(found)),
            "bytes": sum(file.stat().st_size for file in path.rglob("*")),
        }
        logits = model.predict(found.test.images[:RECORDED], verbose=0)
        predicted = {"test_images": RECORDED, "logits": np.round(logits, 5).tolist()}
        runs.write_text(folder / "predictions.json", json.dumps(predicted))
        (folder / "README.md").write_text(model_card(DATASET, record, setting, found))
        results = runs.results_folder(FLAGS.output_dir) / "saved_models.jsonl"
        runs.RunRecords(results).add((name,), record)
        print(f"Wrote {path}: test accuracy {100 * record['test_accuracy']:.2f} %")


if __name__ == "__main__":
    command.run(main)
