"""Kills exports at random moments: no reader ever sees a version that does not load.

    python -m experiments.serving.export_kills --output_dir=.

A process exports version after version; a reader looks at the folder all the time, and
loads each version as soon as it is there. Writes a line of results/serving.jsonl.
"""

from __future__ import annotations

import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf
from absl import app, flags

from experiments.common import runs

FLAGS = flags.FLAGS
FEATURES = 8

EXPORTER = f"""
import sys
import keras
import nsl_keras
model = keras.Sequential(
    [keras.Input(({FEATURES},)), nsl_keras.layers.CosineDense(3)])
version = int(sys.argv[2])
while True:
    print("starts", flush=True)
    nsl_keras.export.save_model(model, sys.argv[1], version)
    version += 1
"""


class Reader(threading.Thread):
    """Loads every version as soon as it sees it.

    Args:
        folder: The folder of versions.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__()
        self._folder = folder
        self.finished = threading.Event()
        self.loaded: list[int] = []
        self.failures: list[str] = []

    def run(self) -> None:
        while not self.finished.is_set() or self._new():
            for version in self._new():
                try:
                    model = tf.saved_model.load(str(self._folder / str(version)))
                    outputs = model.serve(np.ones((2, FEATURES), "float32"))
                    assert outputs.shape == (2, 3)  # noqa: S101
                except Exception as error:
                    self.failures.append(f"version {version}: {error!r}")
                self.loaded.append(version)
            time.sleep(0.001)

    def _new(self) -> list[int]:
        found = [int(path.name) for path in self._folder.iterdir() if path.name.isdigit()]
        return sorted(set(found) - set(self.loaded))


def kill_once(folder: pathlib.Path, first: int, seconds: float) -> None:
    """Starts exports at a version, and kills them so long after the first has begun."""
    with subprocess.Popen(
        [sys.executable, "-c", EXPORTER, str(folder), str(first)],
        stdout=subprocess.PIPE,
        cwd=pathlib.Path(__file__).parents[2],
    ) as process:
        process.stdout.readline()
        time.sleep(seconds)
        if process.poll() is not None:
            raise RuntimeError(f"The export of version {first} failed.")
        process.send_signal(signal.SIGKILL)


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Unknown arguments: {arguments[1:]}")
    moments = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        reader = Reader(folder)
        reader.start()
        left = 0
        for number in range(FLAGS.kills):
            taken = [int(path.name) for path in folder.iterdir() if path.name.isdigit()]
            before = {path.name for path in folder.iterdir()}
            # The version that a kill interrupted is the first of the next process.
            kill_once(folder, max(taken, default=0) + 1, moments.uniform(0, 3))
            after = {path.name for path in folder.iterdir()} - before
            left += any(not name.isdigit() for name in after)
            print(f"kill {number + 1}: {len(after)} new in the folder", flush=True)
        reader.finished.set()
        reader.join()
    record = {
        "command": runs.command("serving.export_kills"),
        "versions": runs.versions(),
        "kills": FLAGS.kills,
        "kills_inside_a_write": left,
        "versions_written": len(reader.loaded),
        "versions_that_did_not_load": len(reader.failures),
    }
    path = runs.results_folder(FLAGS.output_dir) / "serving.jsonl"
    runs.RunRecords(path).add(("export_kills",), record)
    print(record, *reader.failures, sep="\n")
    if reader.failures:
        sys.exit(1)


if __name__ == "__main__":
    flags.DEFINE_integer("kills", 50, "How many exports are killed.", lower_bound=1)
    flags.DEFINE_string("output_dir", "runs", "Where results/ is written.")
    app.run(main)
