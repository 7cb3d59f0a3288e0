"""Kills examples, at random moments and inside each write, and lets them go on.

    python -m experiments.kills                        # about an hour on two cores
    python -m experiments.kills --kills=2 --example=regression

Each run must then end with the weights and figures of one that nothing interrupted, to the
last digit (times apart), leave nothing behind, and not be stuck. Writes what was found to
--output_dir/results/kills.jsonl, a line an example. Needs Linux and TensorFlow.
"""

from __future__ import annotations

import pathlib
import random
import sys
import tempfile

from absl import app, flags

from experiments.common import runs
from experiments.kills.campaign import EXAMPLES, campaign, write_images

FLAGS = flags.FLAGS
flags.DEFINE_multi_enum(
    "example",
    ["image_classification", "few_shot", "demo"],
    list(EXAMPLES),
    "Examples to kill.",
)
flags.DEFINE_integer("kills", 20, "Kills at random moments, all examples.", lower_bound=0)
flags.DEFINE_integer("seed", 0, "Seed of the moments.")
flags.DEFINE_string("output_dir", "runs", "Where results/ is written.")


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Unknown arguments: {arguments[1:]}")
    generator = random.Random(FLAGS.seed)
    about = {"command": runs.command("kills")}
    about["versions"] = runs.versions()
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch).resolve()
        for number, example in enumerate(FLAGS.example):
            (folder / example).mkdir()
            write_images(folder / example / "images.npz")
            share = len(range(number, FLAGS.kills, len(FLAGS.example)))
            found = campaign(example, share, folder / example, generator)
            failed |= bool(found["failures"])
            path = runs.results_folder(FLAGS.output_dir) / "kills.jsonl"
            runs.RunRecords(path).add((example,), {**about, **found})
            print(f"Wrote {path}", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    app.run(main)
