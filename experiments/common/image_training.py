"""What the commands that train image networks share, their flags above all."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping

import keras
import numpy as np
from absl import flags

import nsl_keras
from experiments.common import augmentation, data, image_folders, recipe, runs, time_limit

FLAGS = flags.FLAGS
flags.DEFINE_multi_string("method", [], "Rows to train; all of the table by default.")
flags.DEFINE_list("seeds", ["0"], "Seeds, separated by commas.")
flags.DEFINE_string(
    "dataset", "digits", "digits, a set that comes as folders of images, or one of tfds."
)
flags.DEFINE_string("data_dir", None, "Folder of the set, or of prepared tfds copies.")
flags.DEFINE_string(
    "data_file",
    None,
    "Images from an .npz file, or a folder of them; --dataset names them.",
)
flags.DEFINE_string(
    "write_data_file",
    None,
    "Write the images to such a file, or a folder of files of at most 64 MiB, and stop.",
)
flags.DEFINE_integer("train_size", None, "Number of training images.", lower_bound=1)
flags.DEFINE_bool("hold_out", True, "Keep the validation images out of training.")
flags.DEFINE_integer("image_size", None, "Make the images of so many pixels.")
flags.DEFINE_integer("steps", None, "Training steps; rate drops in proportion.")
flags.DEFINE_alias("iterations", "steps")
flags.DEFINE_float("budget", None, "The same as a fraction of the published steps.")
flags.DEFINE_integer("batch_size", None, "Instead of the published 128.", lower_bound=1)
flags.DEFINE_float("epochs", None, "Training steps as passes over the images.")
flags.DEFINE_float("learning_rate", None, "Instead of the published start rate.")
flags.DEFINE_enum(
    "optimizer",
    None,
    ["momentum", "nesterov", "adam", "adamw"],
    "Instead of the published one.",
)
flags.DEFINE_bool(
    "cosine_decay", None, "Let the rate fall to 0 along a cosine, instead of in drops."
)
flags.DEFINE_integer("warmup_steps", None, "Steps in which the rate rises at the start.")
flags.DEFINE_float("penalty", None, "Instead of the published factor of squared weights.")
flags.DEFINE_float("weight_decay", None, "AdamW's, instead of the published one.")
flags.DEFINE_enum(
    "input",
    None,
    ["unit", "standardized"],
    "Images in [0, 1], or with channels of mean 0 and deviation 1, instead of the "
    "published range.",
)
flags.DEFINE_list("filters", None, "Filters of the stages, instead of the published.")
flags.DEFINE_bool("mixed_precision", False, "Compute in bfloat16, with float32 weights.")
flags.DEFINE_enum(
    "augmentation",
    None,
    augmentation.AUGMENTATIONS,
    "By default the published one, as far as the images allow it: mirror images of digits "
    "are no digits.",
)
flags.DEFINE_string("output_dir", "runs", "Where results/ is written.")
flags.DEFINE_string("state_dir", "runs/unfinished", "Where unfinished runs are kept.")
flags.DEFINE_bool("jit_compile", None, "Compile the steps with XLA; else what suits.")
flags.DEFINE_bool(
    "on_device",
    None,
    "Keep the images on the device, and train many steps in one compiled loop (JAX); "
    "by default on accelerators.",
)
flags.DEFINE_integer(
    "save_every", 500, "Steps after which state is saved, at most.", lower_bound=1
)
flags.DEFINE_bool(
    "step_times", False, "Time the steps of each row beside the plain network's."
)
flags.DEFINE_bool(
    "tune",
    False,
    "Try --rates with each row, evaluated on validation images alone, and stop.",
)
flags.DEFINE_list("rates", ["3e-4", "1e-3", "3e-3"], "Start rates that --tune tries.")
flags.DEFINE_float(
    "tuning_share", 1.0, "The steps of a trial, as a share of the training's."
)
flags.DEFINE_bool("tuned", False, "Train each row at the best of its rates of --tune.")
flags.DEFINE_integer("verbose", 2, "Progress: 0 silent, 1 a bar, 2 a line a chunk.")


#: What the settings of trials need not share with those of runs, which may train on the
#: validation images.
_OF_TRIALS = ("tuning_share", "train_examples", "validation_examples")

#: Rounds of `step_time_ratio` before what is measured, and measured.
WARM_UP_ROUNDS, ROUNDS = 2, 15


def steps_from_flags(published: int, train_examples: int, batch_size: int) -> int:
    """The steps that the flags ask for."""
    given = changes_from_flags("steps", "budget", "epochs")
    if len(given) > 1:
        received = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(
            f"`steps`, `budget` and `epochs` exclude each other. Received: {received}"
        )
    steps = given.get("steps", round(published * given.get("budget", 1)))
    if FLAGS.epochs is not None:
        # Whole chunks of steps, after which state can be saved.
        steps = round(FLAGS.epochs * round(train_examples / batch_size))
    if steps < 1:
        raise ValueError(
            "`steps` and `budget` must leave at least one step. Received: "
            f"steps={FLAGS.steps}, budget={FLAGS.budget}, epochs={FLAGS.epochs}"
        )
    return steps


def recipe_changes_from_flags() -> dict:
    """What the flags change of every recipe."""
    changes = changes_from_flags(
        *("batch_size", "learning_rate", "optimizer", "cosine_decay", "warmup_steps"),
        *("penalty", "weight_decay"),
    )
    return changes | ({"input_range": (0.0, 1.0)} if FLAGS.input else {})


def filters_from_flags() -> list[int] | None:
    """The filters of the stages, where the flags give them."""
    return None if FLAGS.filters is None else [int(each) for each in FLAGS.filters]


def use_dtype_from_flags() -> None:
    """Sets what models are computed in."""
    if FLAGS.mixed_precision:
        keras.config.set_dtype_policy("mixed_bfloat16")


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
    # Trials are judged on the validation images.
    if FLAGS.tune and not len(found.validation.images):
        raise ValueError(
            "`tune` needs validation images. Received: "
            f"{FLAGS.data_file or FLAGS.dataset} without any"
        )
    if FLAGS.write_data_file:
        return found  # As it is: who reads the file says what becomes of the images.
    found = found if FLAGS.hold_out or FLAGS.tune else data.without_validation(found)
    return found.standardized if FLAGS.input == "standardized" else found


def training_examples(found: data.ImageData) -> int:
    """How many images runs are trained on; their trials may hold some of them out."""
    counts = found.counts
    held_out = 0 if FLAGS.hold_out else counts["validation_examples"]
    return counts["train_examples"] + held_out


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
        "data_file": found.fingerprint,
        "recipe": dataclasses.asdict(trained),
        "filters": filters_from_flags(),
        "input": FLAGS.input,
        "precision": "mixed_bfloat16" if FLAGS.mixed_precision else None,
        # Trials are of the runs that follow them.
        "tuned": FLAGS.tuned or FLAGS.tune or None,
    }


def setting_name(network: str, dataset: str, trained: recipe.Recipe) -> str:
    """The name of the folder of a setting's runs."""
    if FLAGS.filters is not None:
        network = f"{network}_{'-'.join(FLAGS.filters)}"
    size = FLAGS.train_size or ("all" if FLAGS.hold_out else "everything")
    tuned = "_tuned" if FLAGS.tuned or FLAGS.tune else ""
    return f"{network}_{dataset}_{size}_{trained.steps}{tuned}"


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


def recipe_of_run(trained: recipe.Recipe, rate: float | None, trial: bool) -> recipe.Recipe:
    """The recipe at the rate of a run, as short as trials are where it is one."""
    if rate is not None:
        trained = dataclasses.replace(trained, learning_rate=rate)
    if trial:
        trained = trained.scaled(max(1, round(trained.steps * FLAGS.tuning_share)))
    return trained


def make_batches(split: data.Split, trained: recipe.Recipe, seed: int) -> recipe.Batches:
    """The batches of a run, in chunks as long as the flags allow."""
    chunk = recipe.chunk_steps(trained.steps, FLAGS.save_every)
    return recipe.Batches(split, trained, seed, chunk)


def trains_on_device(batches: keras.utils.PyDataset) -> bool:
    """Whether chunks of steps are one compiled loop: on accelerators, or as asked."""
    if FLAGS.on_device is not None:
        return FLAGS.on_device
    on_cpu = all(name.startswith("cpu") for name in keras.distribution.list_devices())
    on_jax = keras.backend.backend() == "jax"
    return on_jax and not on_cpu and isinstance(batches, recipe.Batches)


def train_and_evaluate(
    model: keras.Model,
    batches: keras.utils.PyDataset,
    trained: recipe.Recipe,
    state: pathlib.Path,
    evaluated: Mapping[str, dict],
) -> dict:
    """Trains with `recipe.fit`, then evaluates once.

    The state stays until the record is written. `evaluated` holds the arguments of
    `evaluate` for each part. A diverging run is not evaluated. Returns what to record.
    """
    try:
        record = recipe.fit(
            model,
            batches,
            trained,
            state,
            verbose=FLAGS.verbose,
            on_device=trains_on_device(batches),
            deadline=time_limit.deadline(),
        )
    except nsl_keras.NonFiniteLossError as error:
        # A result too: the paper reports one for predictors of plain convolutions.
        record, evaluated = {"diverged": str(error)}, {}
    for part, images in evaluated.items():
        found = model.evaluate(**images, verbose=0, return_dict=True)
        del found["loss"]
        record |= {f"{part}_{key}": float(value) for key, value in found.items()}
    return record


def step_time_ratio(
    model: keras.Model, plain: keras.Model, batches: keras.utils.PyDataset
) -> dict[str, float]:
    """The time of a training step over the plain network's: median and quartiles.

    Rounds of one step each, one after the other, in this process. It trains both.
    """
    batch = batches[0]
    ratios = []
    for number in range(WARM_UP_ROUNDS + ROUNDS):
        times = []
        for each in (plain, model):
            start = time.perf_counter()
            each.train_on_batch(*batch)
            times.append(time.perf_counter() - start)
        if number >= WARM_UP_ROUNDS:
            ratios.append(times[1] / times[0])
    low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75)).round(3).tolist()
    return {"median": median, "low": low, "high": high}


def make_runs(
    path: pathlib.Path,
    name: str,
    setting: dict,
    titles: Mapping[str, str],
    train: Callable[..., dict],
) -> runs.RunRecords:
    """Makes the runs that the flags ask for, or the trials of their rates.

    Args:
        path: The file of the runs; trials are in that of `tuning_place`.
        name: The name of their setting.
        setting: What they have in common. That of trials differs: they hold out the
            validation images.
        titles: Titles of the rows by name.
        train: A function of name, seed, rate, which is `None` for the recipe's own, and the
            folder of the run's state; with `trial=True` it evaluates on validation images
            alone.

    Returns:
        The records of what was made.
    """
    if FLAGS.tune:
        setting = {**setting, "tuning_share": FLAGS.tuning_share}
    states = runs.states_folder(FLAGS.state_dir, setting)
    where = tuning_place(path, name) if FLAGS.tune else (path, name)
    records = runs.RunRecords(*where, setting, states)
    if not FLAGS.tune:
        rates = tuned_rates(path, name, titles, setting) if FLAGS.tuned else {}
        runs.run_all(
            records,
            runs.every(titles, FLAGS.seeds),
            lambda name, seed: train(
                name, seed, rates.get(name), records.state((name, seed))
            ),
        )
        return records
    runs.run_all(
        records,
        {
            (name, float(rate), seed): f"{title}, rate {rate}, seed {seed}, a trial"
            for seed in map(int, FLAGS.seeds)
            for name, title in titles.items()
            for rate in FLAGS.rates
        },
        lambda name, rate, seed: train(
            name, seed, rate, records.state((name, rate, seed)), trial=True
        ),
    )
    return records


def tuning_place(path: pathlib.Path, name: str) -> tuple[pathlib.Path, str]:
    """The file of the trials for the runs of a setting, and their name in it."""
    trials = path.with_name(f"{path.stem}_tuning.jsonl")
    return trials, name.replace("_everything_", "_all_")


def tuned_rates(
    path: pathlib.Path, name: str, titles: Iterable[str], setting: dict
) -> dict[str, float]:
    """The rate of each row that was best on validation images.

    Raises:
        ValueError: If rows have no trials, not the same ones, or those of another setting.
    """
    trials = runs.RunRecords(*tuning_place(path, name))
    different = runs.differences(trials.setting or setting, setting)
    for each in _OF_TRIALS:
        different.pop(each, None)
    if different:
        raise ValueError(
            "`tuned` needs trials of the same setting: call the command with --tune first. "
            f"Received: pairs of (trials, here) that are {different}"
        )
    found: dict[str, dict[float, list[float]]] = {title: {} for title in titles}
    for trial in trials.runs:
        # A trial that diverged is one without accuracy.
        accuracies = found.get(trial["method"], {}).setdefault(trial["learning_rate"], [])
        accuracies.append(trial.get("validation_accuracy", 0.0))
    tried = {
        tuple((rate, len(each)) for rate, each in sorted(rates.items()))
        for rates in found.values()
    }
    if tried == {()} or len(tried) > 1:
        counts = {name: len(rates) for name, rates in found.items()}
        raise ValueError(
            "`tuned` needs the same trials of every row: call the command with --tune "
            f"first. Received: numbers of rates {counts}"
        )
    return {
        name: max(rates, key=lambda rate: statistics.mean(rates[rate]))
        for name, rates in found.items()
    }


def evaluated_parts(found: data.ImageData, trial: bool = False) -> dict[str, dict]:
    """What to evaluate: validation images that took no part in training, and the test.

    The test images take no part in a trial.
    """
    parts = {"validation": found.validation} | ({} if trial else {"test": found.test})
    return {
        part: {"x": split.images, "y": split.labels, "batch_size": 100}
        for part, split in parts.items()
        if len(split.images)
    }
