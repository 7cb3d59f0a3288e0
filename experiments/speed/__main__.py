"""Measures times as ratios, and peak memory.

One rule: only ratios of times taken side by side in this process are reported, because
times on a shared machine mean nothing an hour later.

    python -m experiments.speed                                # everything
    python -m experiments.speed --only=head --only=model --xla=on

Writes --output_dir/results/benchmarks.jsonl, a line a group and mode, and of the costs a
picture in --output_dir/results/figures/.
"""

import gc
import os
from typing import Any

import keras
import tensorflow as tf
from absl import flags

from experiments.common import command, runs
from experiments.speed import costs, neighborhoods, prices, similarity

GROUPS = {
    "static": similarity.static,
    "network": similarity.network,
    "head": neighborhoods.head,
    "model": neighborhoods.model,
    "requests": neighborhoods.requests,
    "many_classes": neighborhoods.many_classes,
    "costs": costs.comparisons,
}
MODES = {"off": ("off",), "on": ("on",), "both": ("off", "on")}

FLAGS = flags.FLAGS
flags.DEFINE_multi_enum(
    "only", [], [*GROUPS, *prices.PARTS], "Groups; all if none is given."
)
flags.DEFINE_enum("xla", "both", list(MODES), "Whether to compile with XLA.")


def measured(group: str, xla: str) -> list[dict[str, Any]]:
    print(f"\n### {group}, XLA {xla}\n", flush=True)
    keras.utils.set_random_seed(0)
    if group in prices.PARTS:  # With the memory.
        found = prices.rows(group, xla == "on")
    else:
        found = (row for each in GROUPS[group](xla == "on") for row in each.rows())
    rows = []
    for row in found:
        print(*(f"{key} {value}" for key, value in row.items()), sep=", ", flush=True)
        rows.append(row)
    return rows


def main(_arguments: list[str]) -> None:
    tf.config.set_visible_devices([], "GPU")
    results = runs.results_folder(FLAGS.output_dir)
    records = runs.RunRecords(results / "benchmarks.jsonl")
    for group in dict.fromkeys(FLAGS.only or [*prices.PARTS, *GROUPS]):
        for xla in MODES[FLAGS.xla]:
            record = {
                **runs.about("speed"),
                "device": "cpu",
                "cores": os.cpu_count(),
                "xla": xla,
                "rows": measured(group, xla),
            }
            records.add((group, xla), record)
            print(f"\nWrote {records.path}", flush=True)
            if group == "costs":
                figure = costs.picture(record["rows"])
                runs.write_figures(results / "figures", {f"costs_xla_{xla}": figure})
            keras.backend.clear_session()
            gc.collect()


if __name__ == "__main__":
    command.run(main)
