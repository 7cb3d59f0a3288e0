"""Images of digits, MNIST or CIFAR-10: every method trained, drawn, exported, served.

One recipe for all: AdamW, a cosine classifier, the same backbone, batches and seeds.

    python -m experiments.demo                             # scikit-learn's digits
    python -m experiments.demo --dataset=cifar10 \\
        --data_dir=~/tensorflow_datasets --train_examples=10000 --epochs=15

Writes below --output_dir, runs/ by default: a line a run in results/demo.jsonl in
place of those that are there, pictures in results/figures/, and a served model in
saved_models/<name>/<version>/. The test images are looked at once, after training. An
interrupted demo goes on where it stopped; a finished one begins anew.
"""

import dataclasses
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import keras
import numpy as np
from absl import flags

import nsl_keras
from experiments.common import command, data, pictures, recipe, runs
from experiments.demo import table
from experiments.demo.networks import SETTINGS, Setting, build_model, compile_model
from experiments.demo.table import TITLES
from experiments.serving.train_models import model_card
from experiments.speed import timing

FLAGS = flags.FLAGS
flags.DEFINE_enum("dataset", "digits", sorted(SETTINGS), "Images to learn.")
flags.DEFINE_string("data_dir", None, "Folder of prepared tensorflow-datasets copies.")
flags.DEFINE_multi_enum("model", [], list(TITLES), "Models to train; all by default.")
flags.DEFINE_integer("seeds", 3, "Number of seeds.", lower_bound=1)
flags.DEFINE_integer("epochs", None, "Epochs, instead of the recipe's.", lower_bound=1)
flags.DEFINE_integer("train_examples", None, "Number of training images.", lower_bound=1)
flags.DEFINE_integer("verbose", 1, "Progress: 0 silent, 1 a bar, 2 a line an epoch.")


def train(
    name: str, setting: Setting, found: data.ImageData, seed: int, state: pathlib.Path
) -> tuple[keras.Model, dict]:
    """Trains one model; what is finished in the folder `state` is not trained again."""
    keras.utils.set_random_seed(seed)
    trained = setting.recipe(name, len(found.train.images))
    model = build_model(name, setting, found.image_shape, len(found.class_names), seed)
    compile_model(model, trained)
    batches = recipe.Batches(found.train, trained, seed, trained.steps // setting.epochs)
    took = recipe.fit(model, batches, trained, state, verbose=FLAGS.verbose)
    return model, {
        **recipe.first_record("demo", name, seed, model),
        "training_loss": took["training_loss"],
        "training_seconds": took["seconds"],
        **recipe.evaluate(model, recipe.evaluated_parts(found)),
    }


def draw(models: dict[str, keras.Model], found: data.ImageData) -> dict[str, Any]:
    figures = {}
    if "static" in models:
        figures["similarities"] = nsl_keras.visualize.plot_similarities(models["static"])
    test, train = found.test.take(2000), found.train
    if "linear_neighborhoods" in models:
        model = models["linear_neighborhoods"]
        figures["adaptation"] = pictures.of_adaptation(model, found, test)
        after, before = (
            each.predict(test.images, verbose=0).argmax(axis=1)
            for each in (model, model.unadapted)
        )
        # Three predictions that adaptation changes, and one that stays wrong.
        changed, wrong = np.flatnonzero(after != before), after != test.labels
        chosen = [*changed[:3], int(np.argmax(wrong & (after == before)))]
        figures["neighbors"] = nsl_keras.visualize.plot_neighbors(
            *(model, test.images[chosen], train.images, train.labels),
            class_names=found.class_names,
            y=test.labels[chosen],
        )
    return {f"{FLAGS.dataset}_{name}": figure for name, figure in figures.items()}


def export_and_serve(
    model: keras.Model,
    record: dict,
    setting: Setting,
    found: data.ImageData,
    path: pathlib.Path,
) -> dict:
    """Writes a SavedModel with its card, and compares with a process serving it."""
    nsl_keras.export.save_model(model, path, examples=found.test.images[:8])
    runs.write_text(path / "README.md", model_card(FLAGS.dataset, record, setting, found))
    images = found.test.images[:256]
    expected = model.predict(images, batch_size=64, verbose=0)
    server = pathlib.Path(__file__).parents[2] / "examples" / "serving" / "__main__.py"
    with tempfile.TemporaryDirectory() as scratch:
        requests, answers = (pathlib.Path(scratch) / f"{name}.npy" for name in "ab")
        np.save(requests, images)
        subprocess.run([sys.executable, server, path, requests, answers], check=True)
        served = np.load(answers)
    difference = float(np.max(np.abs(served - expected)))
    agreeing = int(np.sum(served.argmax(axis=1) == expected.argmax(axis=1)))
    print(
        f"\nServed {path} without nsl_keras: {agreeing} of {len(images)} test "
        f"predictions agree, logits to {difference:.1e}."
    )
    if agreeing < len(images) or difference > 1e-3:
        raise RuntimeError("The served model disagrees with the trained one.")
    return {
        "saved_model": "/".join(path.parts[-3:]),
        "test_images": len(images),
        "agreeing_predictions": agreeing,
        "largest_logit_difference": difference,
    }


def main(_arguments: list[str]) -> None:
    setting = SETTINGS[FLAGS.dataset]
    if FLAGS.epochs:
        setting = dataclasses.replace(setting, epochs=FLAGS.epochs)
    results = runs.results_folder(FLAGS.output_dir)
    found = data.load(FLAGS.dataset, FLAGS.data_dir, FLAGS.train_examples)
    names = FLAGS.model or list(TITLES)
    whole_setting = {**dataclasses.asdict(setting), **found.counts}
    asked = [FLAGS.dataset, names, FLAGS.seeds]
    states = runs.states_folder(FLAGS.state_dir, ["demo", *asked, whole_setting])
    served = next(name for name in ("neighborhoods", *TITLES) if name in names)
    served_folder = results.parent / "saved_models" / f"{FLAGS.dataset}_demo"
    path = results / table.PLACE
    for written in (results / "figures", served_folder):
        written.mkdir(parents=True, exist_ok=True)
    if not states.exists():  # Else an interrupted demo goes on.
        runs.clear(path, FLAGS.dataset)
    records = runs.RunRecords(path, FLAGS.dataset, whole_setting)

    def trained(name: str, seed: int) -> tuple[keras.Model, dict]:
        return train(name, setting, found, seed, states / f"{name}_{seed}")

    keys = runs.every(names, range(FLAGS.seeds))
    runs.run_all(records, keys, lambda *key: trained(*key)[1])
    # Their states are still there.
    models = {name: trained(name, 0)[0] for name in names}
    runs.write_figures(results / "figures", draw(models, found))
    first = {run["method"]: run for run in records.runs if run["seed"] == 0}
    taken = [int(each.name) for each in served_folder.glob("[0-9]*")]
    folder = served_folder / str(max(taken, default=0) + 1)
    answers = export_and_serve(models[served], first[served], setting, found, folder)
    # Last: timing goes on training the models. Times are ratios to the first.
    batch = found.train.take(setting.batch_size)
    steps = {
        name: lambda model=models[name]: model.train_on_batch(batch.images, batch.labels)
        for name in names
    }
    ratios = timing.ratios_to_first(steps, warm_up=3, calls_per_round=3)
    for name in names:
        more = {"step_time_ratio": ratios[name]}
        more |= {"served": answers} if name == served else {}
        records.add((name, 0), first[name] | more)
    runs.remove_state(states)
    print(f"\n{FLAGS.dataset}: {len(found.test.images)} test images\n")
    print(f"{table.table(records.runs)}\n\nWrote {records.path}")
    print(f"Pictures: {results / 'figures'}. Next: examples/README.md has short scripts.")


if __name__ == "__main__":
    command.run(main)
