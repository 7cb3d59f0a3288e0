"""What factorizing a weight matrix does to gradient descent: Section 5.1, Eq. (6).

Linear regression, with a target matrix of low rank and too few data to tell it from others.
Gradient descent on `W` is compared with that on `W'` and `M`, where `W = M^T W'` as in a
layer with a neural similarity, and on `W'` and two or three `M`, deep factorization. All
start from the same small `W`, and reach zero loss: which of the solutions they find is
their implicit regularization. With whole targets, as in the paper, descent on `W` already
finds the solution of smallest nuclear norm; with half of each hidden (matrix completion) it
does not, and it matters where `M` starts, and how many there are.

    python -m experiments.neural_similarity.implicit_regularization

Writes --output_dir/results/implicit_regularization.jsonl, and a picture.
"""

import functools
import itertools
import pathlib
from typing import Any

import numpy as np
from absl import flags
from matplotlib.figure import Figure

from experiments.common import command, runs, tables

FLAGS = flags.FLAGS

FEATURES = OUTPUTS = 20
RANK = 2
#: Size of the entries of `W` at the start.
START = 1e-3
#: By name: number of examples, and the share of the targets' entries that is seen.
DATA = {"whole targets": (10, 1.0), "half of each target": (20, 0.5)}
#: By name: the number of `M`, and what times the identity each starts at.
FLOWS = {
    "W": (0, 1.0),
    "M from I": (1, 1.0),
    "M from I / 10": (1, 0.1),
    "M from I / 30": (1, 1 / 30),
    "two M from I / 10": (2, 0.1),
    "three M from I / 6": (3, 1 / 6),
}
MEASURES = ("loss", "nuclear_norm", "effective_rank", "distance")
PLACE = "implicit_regularization.jsonl"


def effective_rank(values: np.ndarray) -> float:
    """The exponential of the entropy of singular values, as shares of their sum."""
    shares = values[values > 0] / (values.sum() or 1)
    return float(np.exp(-np.sum(shares * np.log(shares)))) if len(shares) else 0.0


def problem(examples: int, observed: float, seed: int) -> tuple[np.ndarray, ...]:
    """Inputs, targets with NaN where they are hidden, the target matrix, and a start."""
    rng = np.random.default_rng(seed)
    target = rng.normal(size=(FEATURES, RANK)) @ rng.normal(size=(RANK, OUTPUTS))
    target /= np.linalg.norm(target, 2)
    inputs = rng.normal(size=(examples, FEATURES)) / np.sqrt(examples)
    seen = rng.random((examples, OUTPUTS)) < observed
    start = START * rng.normal(size=target.shape) / np.sqrt(FEATURES)
    return inputs, np.where(seen, inputs @ target, np.nan), target, start


def product(factors: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.matmul, factors, np.eye(FEATURES))


def descend(
    start: np.ndarray,
    count: int,
    scale: float,
    inputs: np.ndarray,
    targets: np.ndarray,
    rate: float,
    every: int,
    points: int,
) -> list[np.ndarray]:
    """Takes steps of gradient descent; returns `W` at the start and after `every` so many.

    On `1/2 sum |targets - inputs W|^2` over the targets that are not NaN, by all factors of
    `W = M_1^T ... M_count^T W'`.
    """
    factors = [scale * np.eye(FEATURES)] * count + [start / scale**count]
    matrices = [start]
    for step in range(1, 1 + points * every):
        gradient = inputs.T @ np.nan_to_num(inputs @ product(factors) - targets)
        factors = [
            own - rate * product(factors[:n]).T @ gradient @ product(factors[n + 1 :]).T
            for n, own in enumerate(factors)
        ]
        if step % every == 0:
            matrices.append(product(factors))
    return matrices


def measures(matrix: np.ndarray, inputs, targets, target) -> dict[str, float]:
    """Loss, nuclear norm, effective rank, and the distance from the target matrix."""
    singular = np.linalg.svd(matrix, compute_uv=False)
    residuals = np.nan_to_num(targets - inputs @ matrix)
    return {
        "loss": float(0.5 * np.sum(residuals**2)),
        "nuclear_norm": float(singular.sum()),
        "effective_rank": effective_rank(singular),
        "distance": float(np.linalg.norm(matrix - target) / np.linalg.norm(target)),
    }


def picture(found: list[dict]) -> Any:
    """Nuclear norm and effective rank along the steps, for the first seed."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots(2, len(DATA), sharex=True)
    for column, data in enumerate(DATA):
        shown = [run for run in found if (run["data"], run["seed"]) == (data, 0)]
        for axis, measure in zip(axes[:, column], MEASURES[1:], strict=False):
            for run in shown:
                axis.plot(run["steps"][1:], run[measure][1:], label=run["flow"])
            axis.axhline(shown[0]["target"][measure], color="black", linestyle=":")
            axis.set_xscale("log")
            axis.set_ylim(bottom=0)
            axis.set_ylabel(measure.replace("_", " "))
        axes[0, column].set_title(data)
        axes[1, column].set_xlabel("steps")
    axes[1, 0].legend(title="descent on", loc="upper right")
    return figure


def one_run(
    data: str, flow: str, seed: int, learning_rate: float, steps: int, points: int
) -> dict:
    """The record of a descent: measures along the way, or where it ends."""
    inputs, targets, target, start = problem(*DATA[data], seed)
    every = max(1, steps // points)
    matrices = descend(start, *FLOWS[flow], inputs, targets, learning_rate, every, points)
    found = [measures(each, inputs, targets, target) for each in matrices]
    # Curves of the first problem, and where the others end.
    kept = slice(None) if seed == 0 else slice(-1, None)
    return {
        **{"data": data, "flow": flow, "seed": seed},
        **runs.about("neural_similarity.implicit_regularization"),
        "target": measures(target, inputs, targets, target),
        "steps": [every * number for number in range(len(found))][kept],
        **{key: [float(f"{each[key]:.4g}") for each in found[kept]] for key in MEASURES},
    }


def table(found: list[dict]) -> str:
    """One line a kind of data and a flow: means over the seeds at the last step."""
    columns = ["data", "descent on", "loss", "nuclear norm", "effective rank"]
    rows = []
    for data, flow in itertools.product(DATA, [*FLOWS, "(target)"]):
        of = "W" if flow == "(target)" else flow
        own = [run for run in found if (run["data"], run["flow"]) == (data, of)]
        last = [{key: run[key][-1] for key in MEASURES} for run in own]
        if flow == "(target)":
            last = [run["target"] for run in own]
        means = (np.mean([each[key] for each in last]) for key in MEASURES)
        rows.append([data, flow, *map(format, means, (".1e", ".2f", ".1f", ".2f"))])
    return tables.markdown([*columns, "distance from the target"], rows)


def section(results: pathlib.Path) -> str:
    found = runs.RunRecords(results / PLACE).runs
    seeds = len({run["seed"] for run in found})
    return (
        "## Neural Similarity Learning, Section 5.1: implicit regularization\n\n"
        f"{tables.commands(found)}: linear regression by gradient descent on "
        "`W`, or on the factors `W'` and `M` of `W = M^T W'`, and of products of several "
        "`M`, from the same small `W`; "
        f"{found[0]['steps'][-1]:,} steps; number of problems that means are taken over: "
        f"{seeds}.\n\n"
        f"{table(found)}\n\n"
        "![Nuclear norm and effective rank in training]"
        "(figures/implicit_regularization.png)"
    )


def main(_arguments: list[str]) -> None:
    results = runs.results_folder(FLAGS.output_dir)
    names = ("learning_rate", "steps", "points")
    setting = {name: getattr(FLAGS, name) for name in names}
    records = runs.RunRecords(results / PLACE, setting=setting)
    keys = itertools.product(DATA, FLOWS, range(FLAGS.seeds))
    runs.run_all(records, keys, lambda *key: one_run(*key, **setting))
    print(f"{table(records.runs)}\n\nWrote {records.path}")
    drawn = {"implicit_regularization": picture(records.runs)}
    runs.write_figures(results / "figures", drawn)


if __name__ == "__main__":
    flags.DEFINE_integer("steps", 4000, "Steps of gradient descent.", lower_bound=100)
    flags.DEFINE_integer("points", 200, "Points of the curves.", lower_bound=1)
    flags.DEFINE_float("learning_rate", 0.2, "Size of a step.", lower_bound=0)
    flags.DEFINE_integer("seeds", 5, "Problems of each kind.", lower_bound=1)
    command.run(main)
