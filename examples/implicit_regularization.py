r"""What factorising a weight matrix does to gradient descent: Section 5.1, Eq. (6).

Linear regression, with a target matrix of low rank and too few data to tell it from others.
Gradient descent on `W` itself is compared with gradient descent on `W'` and `M`, where
`W = M^T W'` as in a layer with a neural similarity. All start from the same small `W`, in
small steps, and reach zero loss: which of the solutions they find is their implicit
regularization. Nuclear norm and effective rank tell them apart.

    python -m examples.implicit_regularization --output_dir=.

Two kinds of data. With whole targets, as in the paper, descent on a small `W` already finds
the solution of smallest nuclear norm, so that no factorisation can do better. With half of
each target hidden (matrix completion, the case of the theory that the paper builds on) it
does not. There it matters where `M` starts: at the identity, as in the layers of this
package, or near zero.

Writes results/implicit_regularization.json and results/figures/implicit_regularization.png.
"""

from __future__ import annotations

import json
import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from absl import app, flags, logging
from keras import ops

import nsl_keras
from examples import run_records
from examples.implicit_regularization_table import table

FLAGS = flags.FLAGS

FEATURES = OUTPUTS = 20
RANK = 2
#: Size of the entries of `W` at the start.
START = 1e-3
#: By name: number of examples, and the share of the targets' entries that is seen.
DATA = {"whole targets": (10, 1.0), "half of each target": (20, 0.5)}
#: By name: what times the identity `M` starts at; `None` for descent on `W` itself.
FLOWS = {"W": None, "M from I": 1.0, "M from I / 10": 0.1, "M from I / 30": 1 / 30}


def problem(examples: int, observed: float, seed: int) -> tuple[np.ndarray, ...]:
    """Inputs, targets with NaN where they are hidden, the target matrix, and a start."""
    rng = np.random.default_rng(seed)
    target = rng.normal(size=(FEATURES, RANK)) @ rng.normal(size=(RANK, OUTPUTS))
    target /= np.linalg.norm(target, 2)
    inputs = rng.normal(size=(examples, FEATURES)) / np.sqrt(examples)
    seen = rng.random((examples, OUTPUTS)) < observed
    start = START * rng.normal(size=target.shape) / np.sqrt(FEATURES)
    return inputs, np.where(seen, inputs @ target, np.nan), target, start


class HalfSquaredError(keras.losses.Loss):
    """`1/2 sum_i |y_i - f(x_i)|^2` over the entries of `y` that are not NaN."""

    def __init__(self) -> None:
        super().__init__(reduction="sum")

    def call(self, targets, predictions):
        residuals = ops.where(ops.isnan(targets), 0, targets - predictions)
        return 0.5 * ops.sum(ops.square(residuals), axis=-1)


def make_layer(
    start: np.ndarray, scale: float | None, dtype: str = "float32"
) -> keras.layers.Layer:
    """A layer without bias that computes `start^T x`: `scale` is that of its `M`."""
    options = {"use_bias": False, "dtype": dtype}
    if scale is None:
        layer = keras.layers.Dense(OUTPUTS, **options)
    else:
        layer = nsl_keras.layers.NeuralSimilarityDense(
            OUTPUTS,
            similarity="unconstrained",
            similarity_initializer=keras.initializers.Identity(scale),
            **options,
        )
    layer.build((None, FEATURES))
    layer.kernel.assign(start / (scale or 1.0))
    return layer


def matrix_of(layer: keras.layers.Layer) -> np.ndarray:
    """The `W` of a layer, in float64."""
    kernel = getattr(layer, "equivalent_kernel", layer.kernel)
    return np.asarray(ops.convert_to_numpy(kernel), "float64")


def descend(
    layer: keras.layers.Layer,
    inputs: np.ndarray,
    targets: np.ndarray,
    learning_rate: float,
    steps: int,
    points: int,
) -> list[np.ndarray]:
    """Takes steps of gradient descent; returns `W` at the start and at `points` times."""
    each = max(1, steps // points)
    model = keras.Sequential([keras.Input((FEATURES,), dtype=layer.dtype), layer])
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate),
        loss=HalfSquaredError(),
        steps_per_execution=min(each, 20),
    )
    matrices = [matrix_of(layer)]
    model.fit(
        np.tile(inputs, (each, 1)),
        np.tile(targets, (each, 1)),
        batch_size=len(inputs),
        epochs=points,
        shuffle=False,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: matrices.append(matrix_of(layer))
            )
        ],
    )
    return matrices


def measures(matrix: np.ndarray, inputs, targets, target) -> dict[str, float]:
    """Loss, nuclear norm, effective rank, and the distance from the target matrix.

    The effective rank is the exponential of the entropy of the singular values, as shares
    of their sum.
    """
    singular = np.linalg.svd(matrix, compute_uv=False)
    shares = singular / singular.sum()
    shares = shares[shares > 0]
    residuals = np.nan_to_num(targets - inputs @ matrix)
    return {
        "loss": float(0.5 * np.sum(residuals**2)),
        "nuclear_norm": float(singular.sum()),
        "effective_rank": float(np.exp(-np.sum(shares * np.log(shares)))),
        "distance": float(np.linalg.norm(matrix - target) / np.linalg.norm(target)),
    }


def write_picture(runs: list[dict], path: pathlib.Path) -> None:
    """Draws nuclear norm and effective rank along the steps, for the first seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots(2, len(DATA), sharex=True)
    for column, data in enumerate(DATA):
        shown = [run for run in runs if run["data"] == data and run["seed"] == 0]
        for row, measure in enumerate(("nuclear_norm", "effective_rank")):
            axis = axes[row, column]
            for run in shown:
                axis.plot(run["steps"][1:], run[measure][1:], label=run["flow"])
            axis.axhline(shown[0]["target"][measure], color="black", linestyle=":")
            axis.set_xscale("log")
            axis.set_ylim(bottom=0)
            axis.set_ylabel(measure.replace("_", " "))
        axes[0, column].set_title(data)
        axes[1, column].set_xlabel("steps")
    axes[0, 0].legend(title="descent on")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Unknown arguments: {arguments[1:]}")
    logging.set_verbosity(logging.ERROR)
    runs = []
    for data, (examples, observed) in DATA.items():
        for seed in range(FLAGS.seeds):
            inputs, targets, target, start = problem(examples, observed, seed)
            for flow, scale in FLOWS.items():
                matrices = descend(
                    make_layer(start, scale),
                    *(inputs, targets, FLAGS.learning_rate, FLAGS.steps, FLAGS.points),
                )
                found = [measures(each, inputs, targets, target) for each in matrices]
                steps = [
                    number * max(1, FLAGS.steps // FLAGS.points)
                    for number in range(len(found))
                ]
                # Curves of the first problem, and where the others end.
                kept = slice(None) if seed == 0 else slice(-1, None)
                runs.append(
                    {
                        **{"data": data, "flow": flow, "seed": seed},
                        "target": measures(target, inputs, targets, target),
                        "steps": steps[kept],
                        **{
                            key: [float(f"{each[key]:.4g}") for each in found[kept]]
                            for key in found[0]
                        },
                    }
                )
    content = {
        "command": run_records.command("implicit_regularization"),
        "versions": run_records.versions(),
        "learning_rate": FLAGS.learning_rate,
        "runs": runs,
    }
    print(table(content))
    folder = pathlib.Path(FLAGS.output_dir or "runs/implicit_regularization").expanduser()
    folder = folder / "results"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "implicit_regularization.json"
    path.write_text(json.dumps(content) + "\n")
    picture = folder / "figures/implicit_regularization.png"
    write_picture(runs, picture)
    for written in (path, picture):
        print(f"Wrote {written}")


if __name__ == "__main__":
    flags.DEFINE_integer("steps", 4000, "Steps of gradient descent.", lower_bound=100)
    flags.DEFINE_integer("points", 200, "Points of the curves.", lower_bound=1)
    flags.DEFINE_float("learning_rate", 0.2, "Size of a step.", lower_bound=0)
    flags.DEFINE_integer("seeds", 5, "Problems of each kind.", lower_bound=1)
    flags.DEFINE_string(
        "output_dir", None, "Where to write; runs/implicit_regularization by default."
    )
    app.run(main)
