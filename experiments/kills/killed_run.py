"""Runs an example as a command would, and kills the process inside one of its writes.

    python -m experiments.kills.killed_run FOLDER STAGE experiments.demo ...

STAGE is where in a write: `half` of the file is on the disk, `before` it takes its place,
or `after`; `-` kills nothing. Each file is killed at once: FOLDER/killed names those that
were. FOLDER/weights gets the digest of a model's weights after each `fit`.

Operations are deterministic, so that two runs are equal to the last digit.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import runpy
import signal
import stat
import sys

import keras
import tensorflow as tf

HALF, BEFORE, AFTER, NEVER = "half", "before", "after", "-"


def note(path: pathlib.Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def notes(path: pathlib.Path) -> set[str]:
    return set(path.read_text().split("\n")[:-1]) if path.exists() else set()


def kill_in_a_write(folder: pathlib.Path, stage: str) -> None:
    """Lets this process die at a stage of the first write of a file not killed at yet."""
    killed = notes(folder / "killed")
    fsync, replace = os.fsync, pathlib.Path.replace

    def die(target: pathlib.Path) -> None:
        note(folder / "killed", str(target))
        os.kill(os.getpid(), signal.SIGKILL)

    def killing_fsync(descriptor: int) -> None:
        scratch = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        target = scratch.parent.parent / scratch.name
        is_write = scratch.parent.name.startswith(".scratch-") and scratch.name != "probe"
        if stage == HALF and is_write and str(target) not in killed:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                os.ftruncate(descriptor, status.st_size // 2)
                die(target)
        fsync(descriptor)

    def killing_replace(scratch: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        new = str(target) not in killed
        if stage == BEFORE and new:
            die(target)
        replace(scratch, target)
        if stage == AFTER and new:
            die(target)
        return target

    os.fsync, pathlib.Path.replace = killing_fsync, killing_replace


def note_weights(folder: pathlib.Path) -> None:
    """Lets `fit` note what it ended with."""
    fit = keras.Model.fit

    @functools.wraps(fit)
    def noting_fit(model: keras.Model, *args, **kwargs):
        history = fit(model, *args, **kwargs)
        content = b"".join(weights.tobytes() for weights in model.get_weights())
        note(folder / "weights", hashlib.sha256(content).hexdigest())
        return history

    keras.Model.fit = noting_fit


if __name__ == "__main__":
    place, where, module = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3]
    del sys.argv[1:4]
    tf.config.experimental.enable_op_determinism()
    note_weights(place)
    if where != NEVER:
        kill_in_a_write(place, where)
    runpy.run_module(module, run_name="__main__")
