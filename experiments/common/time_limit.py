"""The flag --stop_after_minutes, of the commands that import this module."""

from __future__ import annotations

import time

from absl import flags

FLAGS = flags.FLAGS
flags.DEFINE_float("stop_after_minutes", None, "Stop then; the same command goes on.")

#: When this process began.
STARTED = time.monotonic()


def deadline() -> float | None:
    """The `time.monotonic()` at which --stop_after_minutes stops; `None` without it."""
    minutes = FLAGS.stop_after_minutes if FLAGS.is_parsed() else None
    return None if minutes is None else STARTED + 60 * minutes
