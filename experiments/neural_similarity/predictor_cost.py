"""What predictors of dynamic similarities cost, and what they give: one picture.

    python -m experiments.neural_similarity.predictor_cost --data_file=FILE.npz

Trains a narrow network (16-32-64 filters, two convolutions a stage) on the training classes
of a few-shot image set for a few epochs of Adam, with every kind of predictor below in its
convolutions, and plain. A fifth of the images of each class is kept for validation. The
time of a training step is measured beside the plain network's, in the same process, in
interleaved rounds on one core.

Writes a line a run to --output_dir/results/predictor_cost.jsonl, and a picture to
--output_dir/results/figures/. Runs that are there are not made again, and an interrupted
one goes on where it stopped.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# One core, so that times do not depend on how many there are.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")

import keras
import numpy as np
from absl import flags

import nsl_keras
from experiments.common import command, data, recipe, runs, tables
from experiments.few_shot import data as few_shot_data
from experiments.speed import timing
from nsl_keras.predictors import SharedSimilarityPredictor, SimilarityPredictor
from nsl_keras.training.normalization import BatchNormalization

FLAGS = flags.FLAGS

#: The file of the records, in results/.
PLACE = "predictor_cost.jsonl"
FILTERS = (16, 32, 64)
BATCH_SIZE = 32


@keras.saving.register_keras_serializable("examples")
def depthwise(predictor: SimilarityPredictor, context: Any) -> list[keras.layers.Layer]:
    """A separable hidden layer, and an output that looks at one position."""
    normalized = context.is_diagonal
    output = keras.layers.Conv2D(
        context.outputs,
        1,
        use_bias=False,
        kernel_initializer="he_normal" if normalized else "zeros",
    )
    scale = [BatchNormalization(gamma_initializer="zeros")] if normalized else []
    return [
        keras.layers.SeparableConv2D(context.width, 3, padding="same", use_bias=False),
        BatchNormalization(),
        keras.layers.ReLU(),
        output,
        *scale,
    ]


@keras.saving.register_keras_serializable("examples")
def half_size(predictor: SimilarityPredictor, context: Any) -> list[keras.layers.Layer]:
    """Predicts for blocks of 2x2 positions."""
    normalized = context.is_diagonal
    return [
        keras.layers.AveragePooling2D(2),
        *predictor.hidden(context, "input", normalized),
        keras.layers.ReLU(),
        *predictor.output(context, None, normalized),
        keras.layers.UpSampling2D(),
    ]


#: Arguments of `SimilarityPredictor` by name; `None` for a convolution without predictor.
PREDICTORS: dict[str, dict | None] = {
    "plain": None,
    "default": {},
    "width 4": {"width": 4},
    "width 8": {"width": 8},
    "width 16": {"width": 16},
    "width 64": {"width": 64},
    "1x1 output": {"output_kernel_size": 1},
    "depthwise": {"kind": depthwise},
    "at half size": {"kind": half_size},
    "for blocks of 2x2": {"downsampling": 2},
    "one M an image": {"pooled": True},
    "shared": {},
    "plain convolutions": {"kind": "cnn"},
    "published": {
        "start": "published",
        "batch_normalization": {"momentum": 0.999, "momentum_warmup": False},
    },
}
SIMILARITIES = {"DNS": "diagonal", "UNS": "unconstrained"}
MARKERS = {"DNS": "o", "UNS": "s"}


def make_model(
    similarity: str, name: str, image_shape: tuple[int, ...], classes: int
) -> keras.Model:
    """The network, with the predictor of a name in each of its convolutions."""
    options = PREDICTORS[name]
    predictor = None if options is None else SimilarityPredictor(**options)
    if name == "shared":
        predictor = SharedSimilarityPredictor(predictor, adapted_filters=8)

    def convolution(filters: int) -> keras.layers.Layer:
        arguments = {"padding": "same", "use_bias": False}
        if options is None:
            return keras.layers.Conv2D(filters, 3, **arguments)
        return nsl_keras.layers.NeuralSimilarityConv2D(
            filters,
            3,
            similarity=SIMILARITIES[similarity],
            predictor=predictor,
            **arguments,
        )

    layers = [keras.Input(image_shape)]
    for filters in FILTERS:
        for _ in range(2):
            layers += [
                convolution(filters),
                keras.layers.BatchNormalization(momentum=0.9),
                keras.layers.ReLU(),
            ]
        layers.append(keras.layers.MaxPooling2D())
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(classes)]
    model = keras.Sequential(layers)
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def parts(found: data.Split, classes: int, seed: int) -> tuple[np.ndarray, ...]:
    """Training and validation images of some of the classes, drawn by a seed."""
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.permutation(np.unique(found.labels))[:classes])
    members = rng.permutation(np.flatnonzero(np.isin(found.labels, chosen)))
    images = found.images[members].astype("float32") / 255
    labels = np.searchsorted(chosen, found.labels[members])
    last = len(members) * 4 // 5
    return images[:last], labels[:last], images[last:], labels[last:]


def one_run(
    similarity: str, name: str, seed: int, state: pathlib.Path, found: data.Split
) -> dict:
    """The record of a training, which goes on from what is in the folder `state`."""
    images, labels, validation_images, validation_labels = parts(found, FLAGS.classes, seed)
    keras.utils.set_random_seed(seed)
    shape = images.shape[1:]
    model = make_model(similarity, name, shape, FLAGS.classes)
    steps = -(-len(images) // BATCH_SIZE)
    trained = recipe.Recipe(FLAGS.epochs * steps, batch_size=BATCH_SIZE)
    batches = recipe.Batches(data.Split(images, labels), trained, seed, steps)
    backup = nsl_keras.callbacks.TrainingBackup(state, batches, delete_at_end=False)
    history = model.fit(
        batches,
        shuffle=False,
        epochs=FLAGS.epochs,
        validation_data=(validation_images, validation_labels),
        callbacks=[backup],
        verbose=0,
    ).history
    counts = nsl_keras.convert.summary(model)
    plain = make_model(similarity, "plain", shape, FLAGS.classes)
    return {
        **{"similarity": similarity, "predictor": name, "seed": seed},
        "command": runs.command("neural_similarity.predictor_cost"),
        "versions": runs.versions(),
        **{key: [round(each, 4) for each in history[key]] for key in history},
        "parameters": model.count_params(),
        "multiply_adds": counts.multiply_adds,
        "plain_multiply_adds": counts.plain_multiply_adds,
        "step_time_ratio": list(timing.step_time_ratio(model, plain, batches[0]).values()),
    }


def summarize(found: list[dict]) -> list[dict]:
    """Differences from the plain network, paired by seed, and costs: a row a predictor."""
    rows = []
    plain = {run["seed"]: run for run in found if run["predictor"] == "plain"}

    def last(run: dict) -> float:
        return run["val_accuracy"][-1]

    for similarity in SIMILARITIES:
        for name in PREDICTORS:
            own = [
                run
                for run in found
                if (run["similarity"], run["predictor"]) == (similarity, name)
                and run["seed"] in plain
            ]
            if not own or name == "plain":
                continue
            gains = [100 * (last(run) - last(plain[run["seed"]])) for run in own]
            rows.append(
                {
                    "similarity": similarity,
                    "predictor": name,
                    "gains": gains,
                    "seeds": sorted(run["seed"] for run in own),
                    "time": np.median([run["step_time_ratio"] for run in own], axis=0),
                    "parameters": own[0]["parameters"],
                    "multiply_adds": (own[0]["multiply_adds"] or np.nan)
                    / own[0]["plain_multiply_adds"],
                }
            )
    return rows


def write_picture(rows: list[dict], path: pathlib.Path) -> None:
    """Draws gain in validation accuracy against the time of a step."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    names = dict.fromkeys(row["predictor"] for row in rows)
    colours = dict(zip(names, colormaps["tab20"].colors, strict=False))
    for row in rows:
        axis.errorbar(
            row["time"][0],
            np.mean(row["gains"]),
            yerr=np.std(row["gains"]),
            fmt=MARKERS[row["similarity"]],
            color=colours[row["predictor"]],
            elinewidth=0.8,
            label=f"{row['similarity']} {row['predictor']}",
        )
    axis.axhline(0, color="black", linestyle=":")
    axis.set_yscale("symlog", linthresh=5)
    axis.margins(y=0.15)
    axis.set_xscale("log")
    times = [3, 4, 5, 7, 10, 20]
    axis.set_xticks(times, labels=map(str, times))
    axis.minorticks_off()
    axis.set_xlabel("time of a training step / plain")
    axis.set_ylabel("validation accuracy - plain (points)")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)
    runs.write_figures(path.parent, {path.stem: figure})


def table(rows: list[dict]) -> str:
    """One line a similarity and predictor."""
    columns = ["M", "predictor", "accuracy - plain", "step time", "multiply-adds"]
    return tables.markdown(
        [*columns, "parameters", "seeds"],
        [
            [
                row["similarity"],
                row["predictor"],
                tables.mean(row["gains"], "+"),
                "{:.1f} ({:.1f} to {:.1f})".format(*row["time"]),
                f"{row['multiply_adds']:.1f}",
                f"{row['parameters']:,}",
                ", ".join(map(str, row["seeds"])),
            ]
            for row in rows
        ],
    )


def section(results: pathlib.Path) -> str:
    """The section of results/README.md."""
    title = "## Neural Similarity Learning: what predictors cost"
    records = runs.RunRecords(results / PLACE)
    found = records.runs
    if not found:
        return f"{title}\n\nNot run."
    setting, rows = records.setting, summarize(found)
    there = [f"{row['similarity']} {row['predictor']}" for row in rows]
    names = (f"{each} {name}" for each in SIMILARITIES for name in PREDICTORS)
    not_run = [name for name in names if name not in there and name[4:] != "plain"]
    missing = f"Not run: {', '.join(not_run)}.\n\n" if not_run else ""
    return (
        f"{title}\n\n{tables.commands(found)}: a network of 16, 32 and 64 filters, two "
        f"convolutions a stage, on {setting['classes']} training classes of a few-shot "
        f"image set, {setting['epochs']} epochs of Adam. Validation accuracy less the "
        "plain network's in points, paired by seed; time (median, and middle half of the "
        "rounds) and multiply-adds of a step over those of the plain network, on one core "
        "without XLA."
        f"\n\n{table(rows)}\n\n{missing}"
        "![Gain in accuracy against the time of a step](figures/predictor_cost.png)"
    )


def main(_arguments: list[str]) -> None:
    results = runs.results_folder(FLAGS.output_dir)
    found = few_shot_data.load("images", data_file=FLAGS.data_file)
    setting = {
        "classes": FLAGS.classes,
        "epochs": FLAGS.epochs,
        "data_file": found.fingerprint,
    }
    states = runs.states_folder(FLAGS.state_dir, [PLACE, setting])
    records = runs.RunRecords(results / PLACE, setting=setting, states=states)
    titles = {
        (similarity, name, seed): f"{similarity}, {name}, seed {seed}"
        for seed in map(int, FLAGS.seeds)
        for similarity in FLAGS.similarities
        for name in FLAGS.predictors
        # The plain network is the same with all.
        if name != "plain" or similarity == FLAGS.similarities[0]
    }
    runs.run_all(
        records, titles, lambda *key: one_run(*key, records.state(key), found.train)
    )
    rows = summarize(records.runs)
    print(f"\n{table(rows)}")
    write_picture(rows, results / "figures" / "predictor_cost.png")


if __name__ == "__main__":
    flags.DEFINE_string("data_file", None, "The images, as for experiments.few_shot.")
    flags.DEFINE_integer("classes", 40, "How many of the training classes.")
    flags.DEFINE_integer("epochs", 5, "Passes over the training images.")
    flags.DEFINE_list("predictors", list(PREDICTORS), "Which predictors.")
    flags.DEFINE_list("similarities", list(SIMILARITIES), "Which similarities.")
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds, a run each.")
    flags.mark_flag_as_required("data_file")
    command.run(main)
