"""Ends a command in time: called again, it goes on where it stopped."""

from __future__ import annotations

import time

import keras
from absl import flags

import nsl_keras

FLAGS = flags.FLAGS
flags.DEFINE_float("stop_after_minutes", None, "Stop then; the same command goes on.")

#: When this process began.
STARTED = time.monotonic()


class OutOfTime(SystemExit):
    """Ends a process before its runs are finished; the same command goes on."""

    #: What the process returns: the system's code for "try again".
    CODE = 75

    def __init__(self, message: str) -> None:
        print(f"{message} The same command goes on.", flush=True)
        super().__init__(self.CODE)


class StopInTime(keras.callbacks.Callback):
    """Stops before a chunk that may end too late: it is taken to last as the last.

    The first chunk of a call begins in any case where the deadline is still to come. Else
    calls that are shorter than a chunk would never get on. `backup` knows the times of
    chunks, of so many `steps` each.
    """

    def __init__(self, backup: nsl_keras.callbacks.TrainingBackup, steps: int) -> None:
        super().__init__()
        self.backup, self.steps = backup, steps
        self.first: int | None = None

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        minutes = FLAGS.stop_after_minutes if FLAGS.is_parsed() else None
        if minutes is None:
            return
        if self.first is None:
            self.first = epoch
        expected = 0.0 if epoch == self.first else self.backup.history["seconds"][-1]
        if time.monotonic() + expected > STARTED + 60 * minutes:
            raise OutOfTime(f"Stopped after {epoch * self.steps:,} steps.")
