r"""Trains plain, neural-similarity and Meta-Neighborhoods classifiers on real images.

One recipe for all: AdamW, a cosine classifier, the same backbone, batches and seeds.

    python -m experiments.demo                             # scikit-learn's digits
    python -m experiments.demo --dataset=cifar10 \
        --data_dir=~/tensorflow_datasets --train_examples=10000 --epochs=15

The papers' own tables are made by experiments.neural_similarity and
experiments.image_classification.

Writes below --output_dir, runs/ by default: a line a run in results/demo.jsonl in
place of those that are there, pictures in results/figures/, and a served model in
saved_models/<name>/<version>/. The test images are looked at once, after training. An
interrupted demo goes on where it stopped; a finished one begins anew.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from absl import flags, logging

import nsl_keras
from experiments.common import command, data, recipe, runs, strategies
from experiments.demo import table
from experiments.demo.networks import SETTINGS, Setting, build_model, compile_model
from experiments.demo.table import TITLES
from experiments.serving.card import model_card
from experiments.speed import timing
from nsl_keras.training import files

FLAGS = flags.FLAGS
flags.DEFINE_enum("dataset", "digits", sorted(SETTINGS), "Images to learn.")
flags.DEFINE_string("data_dir", None, "Folder of prepared tensorflow-datasets copies.")
flags.DEFINE_multi_enum(
    "model", [], list(TITLES), "Models to train; all where none is given."
)
flags.DEFINE_integer("seeds", 3, "Number of seeds.", lower_bound=1)
flags.DEFINE_integer("epochs", None, "Epochs, instead of the recipe's.", lower_bound=1)
flags.DEFINE_integer("train_examples", None, "Number of training images.", lower_bound=1)
flags.DEFINE_integer("batch_size", None, "Batch size, all replicas.", lower_bound=1)
flags.DEFINE_float("learning_rate", None, "Start rate, instead of the recipe's.")
flags.DEFINE_integer("num_neighbors", None, "Dictionary size, all models.", lower_bound=1)
flags.DEFINE_float("temperature", None, "Attention temperature, all models.")
flags.DEFINE_string("output_dir", "runs", "Where results/ and saved_models/ are written.")
flags.DEFINE_string("state_dir", "runs/unfinished", "Where unfinished runs are kept.")
flags.DEFINE_integer("version", None, "SavedModel version; the next free by default.")
flags.DEFINE_bool("jit_compile", False, "Compile the steps with XLA.")
flags.DEFINE_bool("tune", False, "Choose hyper-parameters on validation images; no test.")
flags.DEFINE_integer("verbose", 1, "Progress: 0 silent, 1 a bar, 2 a line an epoch.")


def setting_from_flags() -> Setting:
    setting = SETTINGS[FLAGS.dataset]
    changes = {
        field.name: getattr(FLAGS, field.name)
        for field in dataclasses.fields(Setting)
        if field.name in FLAGS and getattr(FLAGS, field.name) is not None
    }
    for field in ("num_neighbors", "temperature"):
        if field in changes:
            changes[f"linear_{field}"] = changes[field]
    return dataclasses.replace(setting, **changes)


def train(
    name: str, setting: Setting, found: data.ImageData, seed: int, state: pathlib.Path
) -> tuple[keras.Model, dict]:
    """Trains one model; returns it and its record.

    What is finished in the folder `state` is not trained again.
    """
    keras.utils.set_random_seed(seed)
    trained = setting.recipe(len(found.train.images))
    strategy = strategies.strategy()
    with strategy.scope():
        model = build_model(
            name,
            setting,
            found.image_shape,
            len(found.class_names),
            seed,
            synchronized=strategy.num_replicas_in_sync > 1,
        )
        model = compile_model(model, trained, FLAGS.jit_compile)
    batches = recipe.Batches(found.train, trained, seed, trained.steps // setting.epochs)
    backup = nsl_keras.callbacks.TrainingBackup(state, batches, delete_at_end=False)
    history = model.fit(
        batches,
        shuffle=False,
        epochs=setting.epochs,
        verbose=FLAGS.verbose,
        callbacks=[recipe.Seconds(), backup],
        validation_data=(found.validation.images, found.validation.labels),
        validation_batch_size=256,
    )
    record = {
        "method": name,
        "seed": seed,
        "command": runs.command("demo"),
        "versions": runs.versions(),
        "parameters": sum(int(keras.ops.size(v)) for v in model.trainable_variables),
        "training_loss": float(history.history["loss"][-1]),
        "validation_accuracy": float(history.history["val_accuracy"][-1]),
        "training_seconds": round(sum(history.history["seconds"]), 1),
    }
    return model, record


def test_accuracies(model: keras.Model, split: data.Split) -> dict[str, float]:
    found = model.evaluate(
        split.images, split.labels, batch_size=256, verbose=0, return_dict=True
    )
    return {f"test_{key}": float(value) for key, value in found.items()}


def step_time_ratios(models: dict[str, keras.Model], batch: tuple) -> dict[str, dict]:
    """Training-step times relative to the first model, interleaved in this process."""
    steps = {
        name: (lambda model=model: model.train_on_batch(*batch))
        for name, model in models.items()
    }
    return {
        name: ratio._asdict()
        for name, ratio in timing.ratios_to_first(
            steps, rounds=15, warm_up=3, calls_per_round=3
        ).items()
    }


def pictures(models: dict[str, keras.Model], found: data.ImageData) -> dict[str, Any]:
    """Pictures of what was learned, by name."""
    figures = {}
    if "static" in models:
        figures["similarities"] = nsl_keras.visualize.plot_similarities(
            strategies.network_of(models["static"])
        )
    for name in ("neighborhoods", "linear_neighborhoods"):
        if name in models:
            figures[name] = nsl_keras.visualize.plot_learned_neighbors(
                models[name],
                found.test.images[:2000],
                class_names=found.class_names,
            )
    return {f"{FLAGS.dataset}_{name}": figure for name, figure in figures.items()}


def next_version(folder: pathlib.Path) -> int:
    taken = [int(p.name) for p in folder.glob("*") if p.name.isdigit()]
    return max(taken, default=0) + 1


def export_and_serve(
    model: keras.Model,
    record: dict,
    setting: Setting,
    found: data.ImageData,
    output: pathlib.Path,
    version: int,
) -> dict:
    """Writes the SavedModel with its card, and compares with a process serving it."""
    folder = output / "saved_models" / f"{FLAGS.dataset}_{record['method']}"
    path = folder / str(version)
    if not path.exists():  # It does where an interrupted demo goes on.
        nsl_keras.export.save_model(
            strategies.network_of(model),
            folder,
            version,
            examples=found.test.images[:8],
        )
    runs.write_text(path / "README.md", model_card(FLAGS.dataset, record, setting, found))
    images = found.test.images[:256]
    expected = model.predict(images, batch_size=64, verbose=0)
    with tempfile.TemporaryDirectory() as scratch:
        requests = pathlib.Path(scratch) / "images.npy"
        answers = pathlib.Path(scratch) / "predictions.npy"
        np.save(requests, images)
        server = pathlib.Path(__file__).parents[2] / "examples" / "serving" / "__main__.py"
        subprocess.run(
            [sys.executable, str(server), str(path), str(requests), str(answers)],
            check=True,
        )
        served = np.load(answers)
    difference = float(np.max(np.abs(served - expected)))
    agreeing = int(np.sum(served.argmax(axis=1) == expected.argmax(axis=1)))
    print(
        f"\nServed {path} without nsl_keras: {agreeing} of {len(images)} test "
        f"predictions agree, logits to {difference:.1e}."
    )
    if agreeing < len(images) or difference > 1e-3:
        raise RuntimeError(
            "The served model disagrees with the trained one: "
            f"{len(images) - agreeing} predictions, logits by {difference:.1e}."
        )
    return {
        "saved_model": path.relative_to(output).as_posix(),
        "test_images": len(images),
        "agreeing_predictions": agreeing,
        "largest_logit_difference": difference,
    }


def publish(
    unfinished: runs.RunRecords, path: pathlib.Path, more: dict[str, dict] | None = None
) -> runs.RunRecords:
    """Puts finished runs in the place of older ones of the data set; deletes the states.

    Args:
        unfinished: The records of all runs.
        path: The file of the results.
        more: What to add to the first seed's record of a method.
    """
    runs.clear(path, FLAGS.dataset)
    records = runs.RunRecords(path, FLAGS.dataset, unfinished.setting)
    for record in unfinished.runs:
        added = (more or {}).get(record["method"], {}) if record["seed"] == 0 else {}
        records.add(record["key"], {**record, **added})
    if strategies.is_first_worker():
        runs.remove(unfinished.path.parent)
    return records


def chosen_version(states: pathlib.Path, folder: pathlib.Path) -> int:
    """The version to export: the same when an interrupted demo goes on.

    Raises:
        ValueError: If another demo wrote the version that the flags ask for.
    """
    versions = runs.RunRecords(states / "version.jsonl")
    if not versions.runs:
        if FLAGS.version and (folder / str(FLAGS.version)).exists():
            # Said before the training, not after it.
            raise ValueError(
                f"`version` must not exist yet, nothing is overwritten: {folder} "
                f"holds it. Received: version={FLAGS.version}"
            )
        versions.add(("version",), {"version": FLAGS.version or next_version(folder)})
        strategies.wait_for_workers()
    return versions.runs[0]["version"]


def tune(
    setting: Setting,
    counts: dict,
    train_one: Callable[..., tuple],
    results: pathlib.Path,
    states: pathlib.Path,
) -> None:
    """Compares settings on the validation images, one change at a time."""
    rates = [{"learning_rate": rate} for rate in (3e-3, 1e-2, 3e-2)]
    dictionaries = [
        {"num_neighbors": size, "temperature": temperature}
        for size in (200, 1000)
        for temperature in (0.1, 0.2)
    ]
    trials = {
        # The rate is chosen for the plain models, and then serves all.
        "plain": rates,
        "linear": rates,
        "neighborhoods": dictionaries,
        "linear_neighborhoods": [
            {f"linear_{key}": value for key, value in each.items()} for each in dictionaries
        ],
    }
    for name in FLAGS.model:
        if name not in trials:
            raise ValueError(
                f"`model` must be one of {', '.join(map(repr, trials))} with `tune`. "
                f"Received: model={name!r}"
            )
    changes_of = {
        (name, ", ".join(f"{key}={value:g}" for key, value in changes.items())): changes
        for name in FLAGS.model or trials
        for changes in trials[name]
    }

    def trial(name: str, change: str, seed: int) -> dict:
        changed = dataclasses.replace(setting, **changes_of[name, change])
        state = unfinished.state((name, change, seed))
        _, record = train_one(name, changed, seed, state)
        return {**record, "change": change}

    files.require_room(results)
    unfinished = runs.RunRecords(
        states / "records.jsonl",
        setting={**dataclasses.asdict(setting), **counts},
        states=states / "models",
    )
    titles = {
        (name, change, seed): f"{TITLES[name]}, {change}, seed {seed}"
        for name, change in changes_of
        for seed in range(FLAGS.seeds)
    }
    runs.run_all(unfinished, titles, trial)
    records = publish(unfinished, results / "demo_tuning.jsonl")
    print(f"\n{table.tuning(records.runs)}\n\nWrote {records.path}")


def main(_arguments: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # Else TensorFlow's notes drown the progress.
    strategies.strategy()
    setting = setting_from_flags()
    output = pathlib.Path(FLAGS.output_dir).expanduser()
    results = runs.results_folder(FLAGS.output_dir)
    found = data.load(FLAGS.dataset, FLAGS.data_dir, FLAGS.train_examples)

    def train_one(
        name: str, changed: Setting, seed: int, state: pathlib.Path
    ) -> tuple[keras.Model, dict]:
        return train(name, changed, found, seed, state)

    names = FLAGS.model or list(TITLES)
    whole_setting = {**dataclasses.asdict(setting), **found.counts}
    asked = [FLAGS.dataset, names, FLAGS.seeds, FLAGS.strategy, FLAGS.tune]
    states = runs.states_folder(FLAGS.state_dir, ["demo", *asked, whole_setting])
    if FLAGS.tune:
        tune(setting, found.counts, train_one, results, states)
        return
    served = next(name for name in ("neighborhoods", *TITLES) if name in names)
    served_folder = output / "saved_models" / f"{FLAGS.dataset}_{served}"
    version = chosen_version(states, served_folder)
    path = results / "demo.jsonl"
    for written in (results / "figures", served_folder):
        files.require_room(written)
    models: dict[str, keras.Model] = {}

    def run(name: str, seed: int) -> dict:
        model, record = train_one(name, setting, seed, states / f"{name}_{seed}")
        if seed == 0:
            models[name] = model
        return {**record, **test_accuracies(model, found.test)}

    unfinished = runs.RunRecords(states / "records.jsonl", setting=whole_setting)
    titles = {name: TITLES[name] for name in names}
    runs.run_all(unfinished, runs.every(titles, range(FLAGS.seeds)), run)
    if FLAGS.strategy == "multiworker":
        records = publish(unfinished, path)
        print(f"\n{table.table(records.runs)}\n\nWrote {records.path}")
        return  # Pictures, the served model and times are made on one machine.
    first = {run["method"]: run for run in unfinished.runs if run["seed"] == 0}
    for name in names:
        if name not in models:  # An interrupted demo trained it.
            models[name], _ = train_one(name, setting, 0, states / f"{name}_0")
    # Times are ratios to the first.
    models = {name: models[name] for name in names}
    runs.write_figures(results / "figures", pictures(models, found))
    answers = export_and_serve(
        models[served], first[served], setting, found, output, version
    )
    # Last: timing goes on training the models.
    batch = found.train.take(setting.batch_size)
    ratios = step_time_ratios(models, (batch.images, batch.labels))
    more = {name: {"step_time_ratio": ratios[name]} for name in names}
    more[served] = {"served": answers, **more[served]}
    records = publish(unfinished, path, more)
    print(f"\n{FLAGS.dataset}: {len(found.test.images)} test images\n")
    print(f"{table.table(records.runs)}\n\nWrote {records.path}")
    print(
        f"Pictures: {results / 'figures'}. Next: examples/README.md has ten short scripts."
    )


if __name__ == "__main__":
    command.run(main)
