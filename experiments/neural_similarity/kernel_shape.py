"""Section 3.5: whether a learned kernel shape `D` switches taps off, and what that gives.

    python -m experiments.neural_similarity.kernel_shape

A tap is off while its real parameter, 1 at the start, is not above 0.5. The network, the
data and the training are those of `experiments.neural_similarity.stability`; rows differ in
the learning rate of `D`, as a multiple of the others'. Rows that prune take as many taps
from each layer as the static `D` of the largest rate switched off with the same seed: after
half of the training, the taps with the smallest `|M|` times the kernel's norm, or random
ones; the rest is trained on.
"""

import functools
import pathlib
from typing import Any

import keras
import numpy as np
from absl import flags

import nsl_keras
from experiments.common import command, runs, tables
from experiments.neural_similarity import stability
from experiments.neural_similarity.methods import with_rate
from experiments.no_harm.training import accuracy

FLAGS = flags.FLAGS

PLACE = "kernel_shape.jsonl"
#: Rates of `D` over the others'.
FACTORS = (1, 10, 30, 100)
#: Titles, rates of `D` or of the run that a row is pruned like, and predictors.
ROWS: dict[str, tuple[str, int | None, str | None]] = {
    "static": ("static DNS", None, None),
    **{
        f"static_{f}": (f"static DNS and D, learning rate times {f}", f, None)
        for f in FACTORS
    },
    "magnitude": ("static DNS, smallest taps pruned", FACTORS[-1], None),
    "random": ("static DNS, random taps pruned", FACTORS[-1], None),
    "dynamic": ("dynamic DNS", None, "sphere"),
    "dynamic_100": ("dynamic DNS and D, learning rate times 100", 100, "sphere"),
}
BASELINE = "static"
PRUNED = ("magnitude", "random")


def layers_of(model: keras.Model) -> list[Any]:
    return [each for each in model.layers if hasattr(each, "bilinear_form")]


def prune(model: keras.Model, counts: list[int], order: str, seed: int) -> None:
    """Holds taps of static similarities at zero from now on."""
    random = np.random.default_rng(seed)
    for layer, count in zip(layers_of(model), counts, strict=True):
        entries = layer.bilinear_form.similarity_parameters
        taps = np.abs(keras.ops.convert_to_numpy(entries)).reshape(-1)
        kernel = keras.ops.convert_to_numpy(layer.kernel).reshape(len(taps), -1)
        size = taps * np.linalg.norm(kernel, axis=1)
        chosen = np.argsort(size) if order == "magnitude" else random.permutation(len(taps))
        mask = np.ones(entries.shape, "float32")
        mask.reshape(-1)[chosen[:count]] = 0
        entries.assign(entries * mask)
        entries.constraint = functools.partial(keras.ops.multiply, mask)


def train(name: str, seed: int, found: list[dict]) -> dict[str, Any]:
    _, factor, predictor = ROWS[name]
    learned = factor is not None and name not in PRUNED
    convolution = functools.partial(
        nsl_keras.layers.NeuralSimilarityConv2D,
        similarity=nsl_keras.similarities.Diagonal(learn_shape=learned),
        predictor=predictor,
    )
    model, (train, test, _) = stability.digits_network(convolution, seed)
    with_rate(
        model.optimizer, [v for v in model.variables if v.name == "shape"], factor or 1
    )
    fit = functools.partial(
        model.fit, train.images, train.labels, batch_size=stability.BATCH, verbose=0
    )
    first = FLAGS.epochs // 2
    fit(epochs=first)
    taps_off = None
    if name in PRUNED:
        like = f"static_{factor}"
        (taps_off,) = (r["taps_off"] for r in found if r["key"] == [like, seed])
        prune(model, taps_off, name, seed)
        # The step is traced again, with the constraints.
        model.compile(model.optimizer, model.loss, jit_compile=False)
    history = fit(initial_epoch=first, epochs=FLAGS.epochs).history
    if learned:
        shapes = [each.learned_shape for each in layers_of(model)]
        taps_off = [int(keras.ops.sum(1 - shape)) for shape in shapes]
    return {
        **{"method": name, "seed": seed, "parameters": model.count_params()},
        "taps": sum(each.bilinear_form.taps for each in layers_of(model)),
        "taps_off": taps_off,
        "training_loss": history["loss"][-1],
        "test_accuracy": accuracy(model, test),
        **runs.about("neural_similarity.kernel_shape"),
    }


def table(found: list[dict]) -> str:
    """A line a row: its accuracy, beside the static similarity's, and its taps."""
    rows = []
    plain = tables.percent(found, BASELINE, "test_accuracy")
    for name, (title, *_) in ROWS.items():
        own = tables.of_method(found, name)
        if own:
            accuracies = tables.percent(found, name, "test_accuracy")
            off = [sum(run["taps_off"] or []) for run in own]
            shown = "" if name == BASELINE else tables.difference(accuracies, plain)
            taps = f"{', '.join(map(str, off))} of {own[0]['taps']}"
            rows.append([title, tables.mean(accuracies.values()), shown, taps])
    columns = ["method", "test accuracy, %", "difference to static DNS"]
    return tables.markdown([*columns, "taps off, by seed"], rows)


def section(results: pathlib.Path) -> str:
    records = runs.RunRecords(results / PLACE)
    found = records.runs
    return (
        "## Neural Similarity Learning, Section 3.5: a learned kernel shape\n\n"
        f"{stability.what_ran(records)}, seeds {tables.seeds(found)}; mean ± standard "
        f"deviation, differences paired by seed.\n\n{table(found)}"
    )


def main(_arguments: list[str]) -> None:
    path = runs.results_folder(FLAGS.output_dir) / PLACE
    records = runs.RunRecords(path, setting=stability.options())
    runs.run_all(
        records,
        runs.every(FLAGS.method or ROWS, FLAGS.seeds),
        lambda name, seed: train(name, seed, records.runs),
    )
    print(f"\n{table(records.runs)}")


if __name__ == "__main__":
    stability.define_flags()
    flags.DEFINE_multi_enum("method", [], list(ROWS), "Rows; all by default.")
    command.run(main)
