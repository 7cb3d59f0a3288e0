r"""Runs the rows of the papers' tables in order of worth, as far as the time allows.

    python -m examples.campaign --plan=narrow --data_dir=~/tensorflow_datasets \
        --budget_minutes=60
    KERAS_BACKEND=jax python -m examples.campaign --plan=published \
        --data_file=cifar10_pieces --budget_minutes=25 --state_dir=~/unfinished

The same command goes on where the last call stopped. --plan=narrow compares narrow networks
on 10,000 images, on a few processor cores; --plan=published has the papers' networks and
numbers of steps, for a GPU. Each row is trained at the rate that was best for it on
validation images; every row has the same number of trials. Rows that were not reached are
"not run" in the tables.

Where there is no tensorflow-datasets, write CIFAR-10 once to a folder of files of at most
64 MiB, and read it with --data_file:

    python -m examples.neural_similarity --dataset=cifar10 \
        --data_dir=~/tensorflow_datasets --write_data_file=cifar10_pieces

Results are small JSON files in --output_dir/results/: a file a run, and in
campaign/<plan>.json the seconds of each command that is finished.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from absl import app, flags

from examples.campaign import plans
from examples.common import runs

FLAGS = flags.FLAGS

#: Seconds that a command may take longer than it was told to, before it is ended.
GRACE = 120

#: What a command did with its time.
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"


def call(command: list[str], folders: list[str], deadline: float) -> str:
    """Calls a command, and says what became of it."""
    module, *arguments = command
    if module == "image_classification":
        arguments.append(f"--model_dir={FLAGS.state_dir}/models")
    left = deadline - time.monotonic()
    try:
        ended = subprocess.run(
            [
                *(sys.executable, "-m", f"examples.{module}"),
                *(*arguments, *folders, f"--stop_after_minutes={left / 60:.2f}"),
            ],
            timeout=left + GRACE,
        )
    except subprocess.TimeoutExpired:
        return STOPPED
    return {0: FINISHED, runs.OutOfTime.CODE: STOPPED}.get(ended.returncode, FAILED)


def folders_from_flags() -> list[str]:
    """The flags that every command is given as they are."""
    names = ("data_dir", "data_file", "output_dir", "state_dir")
    given = [(name, getattr(FLAGS, name)) for name in names]
    return [f"--{name}={value}" for name, value in given if value is not None]


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Unknown arguments: {arguments[1:]}")
    deadline = time.monotonic() + 60 * FLAGS.budget_minutes
    path = runs.results_folder(FLAGS.output_dir) / "campaign" / f"{FLAGS.plan}.json"
    done = json.loads(path.read_text()) if path.exists() else {}
    outcomes: dict[str, list[str]] = {FINISHED: [], STOPPED: [], FAILED: []}
    for command in plans.commands(FLAGS.plan, FLAGS.seeds):
        command = [*command, *FLAGS.also]
        name = " ".join(command)
        if name in done:
            outcomes[FINISHED].append(name)
        elif time.monotonic() > deadline:
            outcomes[STOPPED].append(name)
        else:
            print(f"\n=== {name}", flush=True)
            start = time.monotonic()
            outcome = call(command, folders_from_flags(), deadline)
            outcomes[outcome].append(name)
            if outcome == FINISHED:
                done[name] = round(time.monotonic() - start, 1)
                runs.write_json(path, done)
    print(f"\n{len(outcomes[FINISHED])} commands finished, {len(outcomes[STOPPED])} left")
    for name in outcomes[FAILED]:
        print(f"Failed: {name}")
    if outcomes[FAILED]:
        sys.exit(1)


def _define_flags() -> None:
    flags.DEFINE_enum("plan", "narrow", list(plans.PLANS), "Which rows.")
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds; the first goes through all rows.")
    flags.DEFINE_float("budget_minutes", 60.0, "Begin nothing that takes longer.")
    flags.DEFINE_multi_string("also", [], "A flag of every command, after the plan's.")
    flags.DEFINE_string("data_dir", None, "Folder of prepared tensorflow-datasets copies.")
    flags.DEFINE_string("data_file", None, "An .npz file of images, or a folder of such.")
    flags.DEFINE_string("output_dir", "runs", "Where results/ is written.")
    flags.DEFINE_string("state_dir", "runs/unfinished", "Where unfinished runs are kept.")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
