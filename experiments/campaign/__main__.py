r"""Runs the rows of the papers' tables in order of worth, as far as the time allows.

    python -m experiments.campaign --plan=narrow --data_dir=~/tensorflow_datasets \
        --budget_minutes=60
    KERAS_BACKEND=jax python -m experiments.campaign --plan=cifar10 \
        --data_file=cifar10_pieces --budget_minutes=25 --state_dir=~/unfinished

The same command goes on where the last call stopped. --plan=narrow compares narrow networks
on 10,000 images of CIFAR-10, on a few processor cores. The other plans have the papers'
networks and numbers of steps, for a GPU; each is named after its data set, but
--plan=regression, which reads the UCI files of Table 2 of Meta-Neighborhoods in --data_dir.
A row that is tuned has as many trials as the plan's other such rows, and is trained at the
rate that was best for it on validation images. Tuned are all rows of --plan=narrow and
--plan=mini_imagenet, and of Neural Similarity Learning on CIFAR those of Tables 1 to 4 and
"cost" (three rows of Table 4 are there as published, too); all others have the rates that
the papers give. Rows that were not reached are "not run" in the tables.

Where there is no tensorflow-datasets, write CIFAR-10 once to a folder of files of at most
64 MiB, and read it with --data_file:

    python -m experiments.neural_similarity --dataset=cifar10 \
        --data_dir=~/tensorflow_datasets --write_data_file=cifar10_pieces

Results are lines of JSON in --output_dir/results/: one a run, and in campaign.jsonl one a
finished command. Such a command is not called again: to renew a run, delete its line and
the command's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from experiments.campaign import plans
from experiments.common import runs, stopping

#: Seconds that a command may take longer than it was told to, before it is ended.
GRACE = 120

#: What became of a command.
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"

#: Flags that say where things are: every command is given them as they are.
FOLDERS = ("data_dir", "data_file", "output_dir", "state_dir")


def call(command: list[str], options: argparse.Namespace, deadline: float) -> str:
    """Calls a command, and says what became of it."""
    module, *arguments = command
    for name in FOLDERS:
        if getattr(options, name) is not None:
            arguments.append(f"--{name}={getattr(options, name)}")
    if module == "image_classification":
        arguments.append(f"--model_dir={options.state_dir}/models")
    left = deadline - time.monotonic()
    arguments.append(f"--stop_after_minutes={left / 60:.2f}")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", f"experiments.{module}", *arguments],
            timeout=left + GRACE,
        )
    except subprocess.TimeoutExpired:
        return STOPPED
    return {0: FINISHED, stopping.OutOfTime.CODE: STOPPED}.get(ended.returncode, FAILED)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags of a call."""
    parser = argparse.ArgumentParser("experiments.campaign", description=__doc__)
    parser.add_argument("--plan", choices=list(plans.PLANS), default="narrow")
    parser.add_argument("--seeds", default="0,1,2", help="the first goes through all rows")
    parser.add_argument("--budget_minutes", type=float, default=60.0)
    parser.add_argument(
        "--also", action="append", default=[], help="a flag of every command, after its own"
    )
    parser.add_argument("--data_dir", help="prepared tensorflow-datasets copies")
    parser.add_argument("--data_file", help="an .npz file of images, or a folder of such")
    parser.add_argument("--output_dir", default="runs", help="where results/ is written")
    parser.add_argument(
        "--state_dir", default="runs/unfinished", help="where unfinished runs are kept"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Calls what is left of a plan; returns 1 if a command failed."""
    options = parse(arguments)
    deadline = time.monotonic() + 60 * options.budget_minutes
    path = runs.results_folder(options.output_dir) / "campaign.jsonl"
    done = runs.RunRecords(path, options.plan)
    outcomes: dict[str, list[str]] = {FINISHED: [], STOPPED: [], FAILED: []}
    for planned in plans.commands(options.plan, options.seeds.split(",")):
        command = [*planned, *options.also]
        name = " ".join(command)
        if done.holds((name,)):
            outcome = FINISHED
        elif time.monotonic() > deadline:
            outcome = STOPPED
        else:
            print(f"\n=== {name}", flush=True)
            start = time.monotonic()
            outcome = call(command, options, deadline)
            if outcome == FINISHED:
                seconds = round(time.monotonic() - start, 1)
                done.add((name,), {"seconds": seconds})
        outcomes[outcome].append(name)
    print(f"\n{len(outcomes[FINISHED])} commands finished, {len(outcomes[STOPPED])} left")
    for name in outcomes[FAILED]:
        print(f"Failed: {name}")
    return int(bool(outcomes[FAILED]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
