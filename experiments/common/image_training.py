"""The command that trains image networks row by row: flags, runs, and trials of rates.

`experiments.neural_similarity` and `experiments.image_classification` say what is theirs in
a `Rows`; all else is here.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
from absl import flags

import nsl_keras
from experiments.common import data, options, recipe, runs, tables
from experiments.common.stream import ImageStream, StreamedBatches
from experiments.speed import timing

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("method", [], "Rows to train; all of the table by default.")
flags.DEFINE_string("dataset", "digits", "digits, one of image_folders, or one of tfds.")
flags.DEFINE_integer("train_size", None, "Number of training images.", lower_bound=1)
flags.DEFINE_bool("stream", False, "Read the images while training: ImageNet's.")
flags.DEFINE_bool("hold_out", True, "Keep the validation images out of training.")
flags.DEFINE_integer("steps", None, "Training steps; rate drops in proportion.", 1)
flags.DEFINE_alias("iterations", "steps")
flags.DEFINE_float("epochs", None, "The same as passes over the images.")
flags.DEFINE_integer("batch_size", None, "Instead of the published 128.", lower_bound=1)
flags.DEFINE_float("learning_rate", None, "Instead of the published start rate.")
_OPTIMIZERS = ["momentum", "nesterov", "adam", "adamw"]
flags.DEFINE_enum("optimizer", None, _OPTIMIZERS, "Instead of the published one.")
flags.DEFINE_bool("cosine_decay", None, "Let the rate fall to 0 along a cosine.")
flags.DEFINE_integer("warmup_steps", None, "Steps in which the rate rises at the start.")
_INPUTS = "Images in [0, 1], or with channels of mean 0 and deviation 1; else as published."
flags.DEFINE_enum("input", None, ["unit", "standardized"], _INPUTS)
flags.DEFINE_list("filters", None, "Filters of the stages, instead of the published.")
flags.DEFINE_bool("mixed_precision", False, "Compute in bfloat16, with float32 weights.")
_SUITS = "Else as published, where it suits: mirror images of digits are no digits."
flags.DEFINE_enum("augmentation", None, recipe.AUGMENTATIONS, _SUITS)
flags.DEFINE_bool("step_times", False, "Time steps of each row beside the plain network's.")
flags.DEFINE_bool("tune", False, "Try --rates, judged on validation images, and stop.")
flags.DEFINE_list("rates", ["3e-4", "1e-3", "3e-3"], "Start rates that --tune tries.")
flags.DEFINE_float("tuning_share", 1.0, "Steps of a trial, as a share of the training's.")
flags.DEFINE_bool("tuned", False, "Train each row at the best of its rates of --tune.")

Images = data.ImageData | ImageStream


@dataclasses.dataclass
class Rows:
    """What a command trains: rows by name.

    `make` is a function of name, seed and recipe, which returns the compiled model of
    images; `finish` gets it trained, with its record. Times are ratios to the `baseline`.
    `command` names the file of results, of which `table` makes a table.
    With `curves`, records hold the accuracies on validation images along the way.
    """

    command: str
    names: Sequence[str]
    baseline: str
    recipe: Callable[[str], recipe.Recipe]
    make: Callable[[str, int, recipe.Recipe], keras.Model]
    finish: Callable[[keras.Model, dict], None]
    multiply_adds: Callable[[keras.Model], int | None]
    table: Callable[[runs.RunRecords], str]
    curves: bool = False


def steps_from_flags(published: recipe.Recipe, train_examples: int) -> int:
    if FLAGS.epochs is None:
        return FLAGS.steps or published.steps
    if FLAGS.steps is not None:
        raise ValueError(
            "`steps` and `epochs` exclude each other. Received: "
            f"steps={FLAGS.steps}, epochs={FLAGS.epochs}"
        )
    batch_size = FLAGS.batch_size or published.batch_size
    # Whole chunks of steps, after which state can be saved.
    return max(1, round(FLAGS.epochs * round(train_examples / batch_size)))


def recipe_changes_from_flags() -> dict:
    names = ("batch_size", "learning_rate", "optimizer", "cosine_decay", "warmup_steps")
    return options.changes(*names) | ({"input_range": (0.0, 1.0)} if FLAGS.input else {})


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


def load_images(
    image_size: int | None = None,
    streamed_size: int | None = None,
    prepared: str | None = None,
) -> Images | None:
    """The images that the flags name, of `image_size` pixels where it or its flag is given.

    `None` where the flags ask to write them to a file, which is done. With --stream they
    are those of tfds' `prepared` set, which an `ImageStream` makes `streamed_size` large.
    """
    if FLAGS.mixed_precision:
        keras.config.set_dtype_policy("mixed_bfloat16")
    if not FLAGS.stream:
        return _load_arrays(FLAGS.image_size or image_size)
    # Streamed images have their own range, and no validation part.
    for name in (
        *("data_file", "write_data_file", "train_size", "image_size", "input"),
        *("tune", "tuned", "figures", *(["augmentation"] if streamed_size else [])),
    ):
        if name in FLAGS and FLAGS[name].value:
            raise ValueError(
                f"`{name}` and `stream` exclude each other. Received: "
                f"{name}={FLAGS[name].value!r}, stream=True"
            )
    builder = data.prepared_builder(prepared or FLAGS.dataset, FLAGS.data_dir)
    return ImageStream(builder, streamed_size)


def _load_arrays(image_size: int | None) -> data.ImageData | None:
    if FLAGS.data_file:
        found = data.load_file(FLAGS.data_file, FLAGS.train_size)
    else:
        size = image_size or 32
        found = data.load(FLAGS.dataset, FLAGS.data_dir, FLAGS.train_size, size)
    if image_size and found.image_shape[:2] != (image_size, image_size):
        found = found.resized(image_size)
    # Trials are judged on the validation images.
    if FLAGS.tune and not len(found.validation.images):
        raise ValueError(
            "`tune` needs validation images. Received: "
            f"{FLAGS.data_file or FLAGS.dataset} without any"
        )
    if FLAGS.write_data_file:
        data.save_file(found, FLAGS.write_data_file)
        print(f"Wrote {FLAGS.write_data_file}")
        return None
    found = found if FLAGS.hold_out or FLAGS.tune else data.without_validation(found)
    return found.standardized if FLAGS.input == "standardized" else found


def training_examples(found: Images) -> int:
    """How many images runs are trained on; their trials may hold some of them out."""
    counts = found.counts
    held_out = 0 if FLAGS.hold_out else counts["validation_examples"]
    return counts["train_examples"] + held_out


def setting_of(found: Images, trained: recipe.Recipe, **others: object) -> dict:
    return {
        **others,
        "dataset": FLAGS.dataset,
        **found.counts,
        "image_shape": found.image_shape,
        "classes": len(found.class_names),
        "data_file": found.fingerprint,
        "recipe": dataclasses.asdict(trained),
        "filters": FLAGS.filters and [int(each) for each in FLAGS.filters],
        "input": FLAGS.input,
        "precision": "mixed_bfloat16" if FLAGS.mixed_precision else None,
        # Trials are of the runs that follow them.
        "tuned": FLAGS.tuned or FLAGS.tune or None,
    }


def setting_name(network: str, dataset: str, trained: recipe.Recipe) -> str:
    if FLAGS.filters is not None:
        network = f"{network}_{'-'.join(FLAGS.filters)}"
    size = FLAGS.train_size or ("all" if FLAGS.hold_out else "everything")
    tuned = "_tuned" if FLAGS.tuned or FLAGS.tune else ""
    # Backends draw other start weights, which seeds would hide.
    backend = f"_{keras.backend.backend()}".removesuffix("_tensorflow")
    return f"{network}_{dataset}_{size}_{trained.steps}{tuned}{backend}"


def train(
    rows: Rows, found: Images, name: str, seed: int, rate: float | None, state: pathlib.Path
) -> dict:
    """Trains one row with one seed, evaluates it once, and returns its record.

    A start `rate` of `None` is the recipe's own. With --tune it is a trial.
    """
    keras.utils.set_random_seed(seed)
    trained = rows.recipe(name)
    if rate is not None:
        trained = dataclasses.replace(trained, learning_rate=rate)
    if FLAGS.tune:
        trained = trained.scaled(max(1, round(trained.steps * FLAGS.tuning_share)))

    model = rows.make(name, seed, trained)
    record = recipe.first_record(rows.command, name, seed, model)
    record["steps"] = trained.steps
    record["multiply_adds"] = rows.multiply_adds(model)
    if rate is not None:
        record["learning_rate"] = rate
    chunk = recipe.chunk_steps(trained.steps, FLAGS.save_every)
    batches: recipe.Batches
    validation = None
    if isinstance(found, ImageStream):
        batches = StreamedBatches(found, trained, seed, chunk)
        evaluated = {"test": {"x": found.batches("validation", 100)}}
    else:
        batches = recipe.Batches(found.train, trained, seed, chunk)
        evaluated = recipe.evaluated_parts(found, FLAGS.tune)
        if rows.curves and not FLAGS.tune and len(found.validation.images):
            validation = found.validation
    try:
        record |= recipe.fit(model, batches, trained, state, FLAGS.verbose, validation)
    except nsl_keras.NonFiniteLossError as error:
        # A result too: the paper reports one for predictors of plain convolutions.
        return record | {"diverged": str(error)}
    record |= recipe.evaluate(model, evaluated)
    record |= recipe.peak_memory()
    if not FLAGS.tune:
        rows.finish(model, record)
    if FLAGS.step_times and not FLAGS.tune:
        plain = rows.make(rows.baseline, seed, trained)
        record["step_time"] = timing.step_time_ratio(model, plain, batches[0])
    return record


def make_runs(rows: Rows, name: str, setting: dict, found: Images) -> runs.RunRecords:
    """Makes the runs that the flags ask for, or the trials of their rates, and prints them.

    The setting of trials differs: they hold out the validation images.
    """
    path = runs.results_folder(FLAGS.output_dir) / f"{rows.command}.jsonl"
    if FLAGS.tune:
        setting = {**setting, "tuning_share": FLAGS.tuning_share}
    states = runs.states_folder(FLAGS.state_dir, setting)
    trials = path.with_name(f"{path.stem}_tuning.jsonl"), name.replace("everything", "all")
    records = runs.RunRecords(*(trials if FLAGS.tune else (path, name)), setting, states)
    if FLAGS.tune:
        keys = runs.every(rows.names, map(float, FLAGS.rates), FLAGS.seeds)
        rates: dict[str, float] = {}
    else:
        keys = runs.every(rows.names, FLAGS.seeds)
        made = runs.RunRecords(*trials)
        rates = tuned_rates(made, rows.names, setting) if FLAGS.tuned else {}

    def run(*key: Any) -> dict:
        name, *tried, seed = key
        rate = tried[0] if tried else rates.get(name)
        return train(rows, found, name, seed, rate, records.state(key))

    runs.run_all(records, keys, run)
    shown = tables.trials(records.runs) if FLAGS.tune else rows.table(records)
    print(f"\n{shown}\n\nWrote {records.path}")
    return records


def tuned_rates(
    trials: runs.RunRecords, names: Iterable[str], setting: dict
) -> dict[str, float]:
    """The rate of each row that was best on validation images."""
    different = runs.differences(trials.setting or setting, setting)
    # Runs may train on the validation images of their trials.
    for each in ("tuning_share", "train_examples", "validation_examples"):
        different.pop(each, None)
    if different:
        raise ValueError(
            "`tuned` needs trials of the same setting: call the command with --tune first. "
            f"Received: pairs of (trials, here) that are {different}"
        )
    found = {name: tables.of_method(trials.runs, name) for name in names}
    tried = {str(sorted(run["learning_rate"] for run in own)) for own in found.values()}
    if tried == {"[]"} or len(tried) > 1:
        counts = {name: len(tables.scores(own)) for name, own in found.items()}
        raise ValueError(
            "`tuned` needs the same trials of every row: call the command with --tune "
            f"first. Received: numbers of rates {counts}"
        )
    return {name: tables.best_rate(own) for name, own in found.items()}
