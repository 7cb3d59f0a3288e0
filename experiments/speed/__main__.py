"""Measures times as ratios, and peak memory; prints Markdown tables and writes JSON.

One rule: only ratios of times taken side by side in this process are reported, because
times on a shared machine mean nothing an hour later.

    python -m experiments.speed                                # everything
    python -m experiments.speed --only=head --only=model --xla=on --rounds=5

Writes --output_dir/results/benchmarks.jsonl, a line a group and mode, and of the costs a
picture in --output_dir/results/figures/.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import tensorflow as tf
from absl import flags

from experiments.common import command, runs
from experiments.speed import costs, memory, neighborhoods, similarity
from experiments.speed.table import MEMORY

GROUPS = {
    "static": similarity.static,
    "dynamic": similarity.dynamic,
    "network": similarity.network,
    "head": neighborhoods.head,
    "model": neighborhoods.model,
    "costs": costs.comparisons,
}
MODES = {"off": (False,), "on": (True,), "both": (False, True)}

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 15, "Rounds; slow cases take fewer.", lower_bound=1)
flags.DEFINE_multi_enum("only", [], [*GROUPS, MEMORY], "Groups; all if none is given.")
flags.DEFINE_enum("xla", "both", list(MODES), "Whether to compile with XLA.")


def measured_rows(group: str, xla: bool) -> Iterator[dict[str, Any]]:
    """Measures a group, printing its table row by row."""
    print(f"\n### {group}, XLA {_on_or_off(xla)}\n")
    keras.utils.set_random_seed(0)
    if group == MEMORY:
        print("| case | candidate | peak memory in MiB |\n|---|---|---|", flush=True)
        rows = memory.rows(xla)
    else:
        print("| case | candidate | time / baseline | 95 % interval | rounds | baseline |")
        print("|---|---|---|---|---|---|", flush=True)
        rows = (row for each in GROUPS[group](xla) for row in each.rows(FLAGS.rounds))
    for row in rows:
        cells = [row["case"], row["candidate"]]
        if group == MEMORY:
            cells.append(f"{row['mebibytes']:.0f}")
        else:
            cells += [f"{row['median']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}"]
            cells += [str(row["rounds"]), row["baseline"]]
        print(f"| {' | '.join(cells)} |", flush=True)
        yield row


def content(xla: bool, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "command": runs.command("speed"),
        "versions": runs.versions(),
        "device": "cpu",
        "cores": os.cpu_count(),
        "xla": _on_or_off(xla),
        "rows": rows,
    }


def _on_or_off(xla: bool) -> str:
    return "on" if xla else "off"


def main(_arguments: list[str]) -> None:
    tf.config.set_visible_devices([], "GPU")
    results = runs.results_folder(FLAGS.output_dir)
    records = runs.RunRecords(results / "benchmarks.jsonl")
    for group in dict.fromkeys(FLAGS.only or [*GROUPS, MEMORY]):
        for xla in MODES[FLAGS.xla]:
            rows = list(measured_rows(group, xla))
            records.add((group, _on_or_off(xla)), content(xla, rows))
            print(f"\nWrote {records.path}", flush=True)
            if group == "costs":
                name = f"costs_xla_{_on_or_off(xla)}"
                runs.write_figures(results / "figures", {name: costs.picture(rows)})
            keras.backend.clear_session()
            gc.collect()


if __name__ == "__main__":
    command.run(main)
