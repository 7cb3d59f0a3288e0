"""Section 3.3.1: which predictors train, and what keeps the others from it.

    python -m experiments.neural_similarity.stability

The convolutions of a narrow CNN get a dynamic similarity, whose predictors differ in their
two layers, in what follows the second, and in where that starts. They learn digits by SGD
with momentum; a row is one predictor. Predictors have the authors' width, and start at
He's normal; the last layer, where a row says so, at a thousandth of it, as the authors'
code does.
"""

import functools
import itertools
import pathlib
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from absl import flags
from matplotlib.figure import Figure

import nsl_keras
from experiments.common import command, runs, tables
from experiments.common.convolutions import SIMILARITIES
from experiments.no_harm import networks
from experiments.no_harm.data import DATASETS, Images
from experiments.no_harm.training import accuracy
from nsl_keras.predictors import SimilarityPredictor

FLAGS = flags.FLAGS

PLACE = "stability.jsonl"
#: Of the last layer of predictors: He's normal, and the authors' share of it.
HE, SMALL = 1.0, 1e-3
BATCH = 32
SGD = {"learning_rate": 0.03, "momentum": 0.9}
#: Steps that losses are averaged over.
LAST = 20


class Row(NamedTuple):
    """A predictor: which layers divide by norms, what follows, where it starts."""

    title: str
    hidden: str | None = None
    output: str | None = None
    after: Callable[[], keras.layers.Layer] | None = None
    start: float = HE
    residual: bool = True


_batch_norm = functools.partial(nsl_keras.layers.BatchNormalization, momentum=0.9)
_sigmoid = functools.partial(keras.layers.Activation, "sigmoid")
ROWS = {
    "cnn": Row("plain convolutions"),
    "cnn_alone": Row("plain convolutions, no residual", residual=False),
    "cnn_small": Row("plain convolutions, small start", start=SMALL),
    "cnn_batch_norm": Row("plain convolutions, batch norm after", after=_batch_norm),
    "cnn_sigmoid": Row("plain convolutions, sigmoid after", after=_sigmoid),
    "sphere": Row("sphere", "input"),
    "sphere_small": Row("sphere, small start (the default kind)", "input", start=SMALL),
    "full_sphere": Row("full sphere, batch norm after", "both", "both", _batch_norm),
    "bounded": Row("full sphere, bounded", "both", "both"),
    "bounded_alone": Row(
        "full sphere, bounded, no residual", "both", "both", residual=False
    ),
}
PLAIN = "plain"


def predictor(row: Row) -> SimilarityPredictor:
    def layers(recipe: SimilarityPredictor, context: Any) -> list[keras.layers.Layer]:
        (first,) = recipe.hidden(context, row.hidden)
        last = recipe.output(context, row.output)[0]
        # As Keras starts convolutions before a ReLU, whatever follows.
        first.kernel_initializer = keras.initializers.HeNormal()
        last.kernel_initializer = keras.initializers.VarianceScaling(
            2 * row.start**2, "fan_in", "truncated_normal"
        )
        return [first, keras.layers.ReLU(), last, *([row.after()] if row.after else [])]

    return SimilarityPredictor(layers, start="published", residual=row.residual)


def define_flags() -> None:
    flags.DEFINE_integer("epochs", 8, "Epochs.", lower_bound=2)
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds, a run each.")


def options() -> dict[str, Any]:
    return {"epochs": FLAGS.epochs, **SGD, "batch_size": BATCH}


def digits_network(
    convolution: Callable[..., keras.layers.Layer], seed: int
) -> tuple[keras.Model, Images]:
    """A narrow CNN, compiled, and the images that it learns."""
    images = DATASETS["digits"].load(seed)
    keras.utils.set_random_seed(seed)
    shape, batch_norm = images.train.images.shape[1:], networks.BATCH_NORMS["unbiased"]
    make = networks.NETWORKS["narrow_cnn"].make
    model = make(shape, images.classes, convolution, batch_norm)
    optimizer = keras.optimizers.SGD(**SGD)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    return model, images


class Losses(keras.callbacks.Callback):
    """The loss of each step's batch, and the largest entry of a prediction on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        # Keras's logs are means since the start of the epoch.
        total = batch * self.mean if batch else 0.0
        self.mean = float((logs or {})["loss"])
        self.losses.append((batch + 1) * self.mean - total)


def largest_entry(model: keras.Model, images: np.ndarray) -> float | None:
    """Of what predictors add to the identity, or predict without one."""
    found = []
    for layer in (each for each in model.layers if hasattr(each, "predicted_matrices")):
        x = keras.Model(model.input, layer.input).predict(images, verbose=0)
        matrices = keras.ops.convert_to_numpy(layer.predicted_matrices(x))
        form = layer.bilinear_form
        identity = np.eye(matrices.shape[-1]) if form.predictor.residual else 0.0
        found.append(float(np.abs(matrices - identity).max()))
    return max(found, default=None)


def train(similarity: str, name: str, seed: int) -> dict[str, Any]:
    convolution: Callable[..., keras.layers.Layer] = keras.layers.Conv2D
    if name != PLAIN:
        convolution = functools.partial(
            nsl_keras.layers.NeuralSimilarityConv2D,
            similarity=SIMILARITIES[similarity],
            predictor=predictor(ROWS[name]),
        )
    model, images = digits_network(convolution, seed)
    followed = Losses()
    callbacks = [followed, keras.callbacks.TerminateOnNaN()]
    own = {"batch_size": BATCH, "epochs": FLAGS.epochs, "verbose": 0}
    x, y = images.train.images, images.train.labels
    model.fit(x, y, callbacks=callbacks, **own)
    record = {
        "method": name,
        "similarity": similarity,
        "seed": seed,
        "parameters": model.count_params(),
        "accuracy": accuracy(model, images.test),
        "losses": [float(f"{each:.4g}") for each in followed.losses],
        "largest_entry": largest_entry(model, images.test.images[:50]),
    }
    keras.utils.clear_session()
    return record | runs.about("neural_similarity.stability")


def table(found: list[dict]) -> str:
    """A line a predictor: accuracies, losses and predictions where training ended."""
    rows = []
    for name, similarity in itertools.product((PLAIN, *ROWS), SIMILARITIES):
        own = [r for r in tables.of_method(found, name) if r["similarity"] == similarity]
        if not own or (name == PLAIN and similarity != next(iter(SIMILARITIES))):
            continue
        loss = statistics.mean(statistics.mean(run["losses"][-LAST:]) for run in own)
        entries = [run["largest_entry"] for run in own if run["largest_entry"]]
        accuracies = tables.percent(own, name, "accuracy").values()
        titles = (ROWS[name].title, similarity) if name in ROWS else ("(no similarity)", "")
        largest = f"{max(entries):.3g}" if entries else ""
        shown = tables.mean(accuracies), f"{min(accuracies):.2f}", f"{loss:.3f}", largest
        rows.append([*titles, *shown, tables.seeds(own)])
    columns = ["predictor", "M", "test accuracy, %", "worst seed", "training loss"]
    return tables.markdown([*columns, "largest entry predicted", "seeds"], rows)


def picture(found: list[dict]) -> Any:
    """The losses of all seeds along the steps, means over some steps."""
    kinds = [kind for kind in SIMILARITIES if any(r["similarity"] == kind for r in found)]
    figure = Figure(figsize=(4.5 * len(kinds) + 3, 4), layout="constrained")
    axes = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for axis, kind in zip(axes, kinds, strict=True):
        for number, name in enumerate((PLAIN, *ROWS)):
            own = [r for r in tables.of_method(found, name) if r["similarity"] == kind]
            look = {"color": "black" if name == PLAIN else f"C{number - 1}", "linewidth": 1}
            label = ROWS[name].title if name in ROWS else "(no similarity)"
            for run in own:
                smooth = np.convolve(run["losses"], np.full(LAST, 1 / LAST), "valid")
                axis.plot(smooth, label=label if run is own[0] else None, **look)
        axis.set_title(kind)
        axis.set_xlabel("steps")
    axes[0].set_ylabel(f"training loss, mean of {LAST} steps")
    axes[0].set_yscale("log")
    axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7)
    return figure


def what_ran(records: runs.RunRecords) -> str:
    setting = records.setting
    return (
        f"{tables.commands(records.runs)}: a narrow CNN on digits, {setting['epochs']} "
        f"epochs of SGD at {setting['learning_rate']:g} with momentum "
        f"{setting['momentum']:g}"
    )


def section(results: pathlib.Path) -> str:
    records = runs.RunRecords(results / PLACE)
    found, setting = records.runs, records.setting
    return (
        "## Neural Similarity Learning, Section 3.3.1: predictors that train\n\n"
        f"{what_ran(records)}, batches of {setting['batch_size']}; both layers of a "
        "predictor start at He's normal, the last one of a small start at a thousandth of "
        "it. Accuracy on the test images after the last step, mean ± standard deviation "
        f"over seeds; the mean loss of the last {LAST} steps; the largest entry that any "
        "seed's predictors add to the identity, or predict without the residual, on 50 "
        f"test images.\n\n{table(found)}\n\n![Training losses](figures/stability.png)"
    )


def main(_arguments: list[str]) -> None:
    results = runs.results_folder(FLAGS.output_dir)
    setting = options() | {"network": "narrow_cnn"}
    records = runs.RunRecords(results / PLACE, setting=setting)
    names = FLAGS.similarity or SIMILARITIES, FLAGS.method or [PLAIN, *ROWS]
    runs.run_all(records, runs.every(*names, FLAGS.seeds), train)
    print(f"\n{table(records.runs)}")
    runs.write_figures(results / "figures", {"stability": picture(records.runs)})


if __name__ == "__main__":
    define_flags()
    flags.DEFINE_multi_enum("similarity", [], list(SIMILARITIES), "Both by default.")
    flags.DEFINE_multi_enum("method", [], [PLAIN, *ROWS], "Predictors; all by default.")
    command.run(main)
