"""Kills trainings, and looks at what a later process finds.

    python -m experiments.kills --output_dir=.     # half an hour on one core

Each training keeps its state after every epoch, with one of three callbacks. It is killed
at random moments, and inside writes: at a file operation, or in the write that makes a file
longer than a random size. Another process then trains to the end. Writes
results/kills.jsonl below --output_dir, a line for each callback. Needs Linux, TensorFlow,
and for `OrbaxCheckpoint` the package orbax-checkpoint.
"""

import hashlib
import multiprocessing
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import keras
import numpy as np
from absl import flags

import nsl_keras
from experiments.common import command, runs, tables

FLAGS = flags.FLAGS
EPOCHS = 20
#: Of each kind.
KILLS = 20

# Each process is forked from one that has imported all of this and computed nothing.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tensorflow", "experiments.kills"])
NAMES = ("TrainingBackup", "BackupAndRestore", "OrbaxCheckpoint")

#: The two kinds of kills, and what may go wrong after one, as the heads of rows.
KINDS = {"kills": "kills at random moments", "kills_in_writes": "kills inside writes"}
FAULTS = {
    "crashed": "could not start again",
    "half_written": "loaded half a state",
    "miscounted": "trained an epoch again on weights that had it, or left one out",
    "second_model": "loaded nothing into the second model of a process",
    "seeds": "other seeds of dropout",
    "history": "`History` lacks the first epochs",
    "stopping": "`EarlyStopping` began anew",
    "weights": "other weights in the end",
}


def restored(
    name: str, model: keras.Model, folder: pathlib.Path, stopping: keras.callbacks.Callback
) -> tuple[keras.callbacks.Callback, int]:
    """Returns a callback, and the epoch to begin at if the callback does not know it."""
    kept: dict[str, Any] = {"delete_checkpoint": False}
    if name == "TrainingBackup":
        return nsl_keras.callbacks.TrainingBackup(folder, [stopping], **kept), 0
    if name == "BackupAndRestore":
        kept["double_checkpoint"] = True
        return keras.callbacks.BackupAndRestore(str(folder), **kept), 0
    # This one only writes: whoever resumes loads the newest step, and counts on.
    callback = keras.callbacks.OrbaxCheckpoint(str(folder))
    newest = callback.checkpointer.latest
    if newest is None:
        return callback, 0
    model.load_weights(str(folder))
    return callback, newest.step + 1


class Report(keras.callbacks.Callback):
    """Sends the state at which training begins, and the state after each epoch."""

    def __init__(self, out: Connection) -> None:
        super().__init__()
        self.out, self.begins = out, True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.begins:
            self.send(epoch)
        self.begins = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.send(epoch + 1)

    def on_train_end(self, logs: Any = None) -> None:
        self.on_epoch_begin(EPOCHS)

    def send(self, epoch: int) -> None:
        # Seeds of layers are variables, but no weights.
        weights = self.model.weights
        known = set(map(id, weights))
        seeds = [v for v in self.model.non_trainable_variables if id(v) not in known]
        state = [[*weights, *self.model.optimizer.variables], seeds]
        self.out.send((epoch, *map(digest, state)))


def digest(variables: Sequence[keras.Variable]) -> str:
    content = b"".join(keras.ops.convert_to_numpy(each).tobytes() for each in variables)
    return hashlib.sha256(content).hexdigest()[:12]


def make() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = nsl_keras.MetaNeighborhoodModel(
        keras.Sequential([keras.Input((16,)), keras.layers.Dense(64, activation="relu")]),
        nsl_keras.layers.CosineDense(5),
        nsl_keras.layers.NeighborDictionary(50, dropout=0.3, seed=0),
    )
    model.build((None, 16))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def child(
    out: Connection,
    folder: pathlib.Path,
    name: str,
    models: int,
    operations: int,
    size: int,
) -> None:
    """Trains the last of some models, from what an earlier process left in the folder.

    After some file operations dies, at once or in a longer write.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    seen = 0

    def notice(event: str, arguments: tuple) -> None:
        nonlocal seen
        if arguments and str(arguments[0]).startswith(str(folder)):
            seen += 1
            if seen == operations:
                if not size:
                    os.kill(os.getpid(), signal.SIGKILL)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    sys.addaudithook(notice)
    model = [make() for _ in range(models)][-1]
    random = np.random.default_rng(0)
    x, y = random.normal(size=(64, 16)).astype("float32"), random.integers(5, size=64)
    stopping = keras.callbacks.EarlyStopping("loss", patience=EPOCHS, mode="max")
    backup, first = restored(name, model, folder, stopping)
    callbacks = [backup, stopping, Report(out)]
    options = {"initial_epoch": first, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, epochs=EPOCHS, callbacks=callbacks, **options)
    out.send((history.epoch, stopping.wait))
    out.send((seen,))


def run(
    folder: pathlib.Path,
    name: str,
    models: int = 1,
    seconds: float = 1e5,
    kill_at: tuple[int, int] = (0, 0),
) -> tuple[int, list[tuple], float]:
    """Returns a process's exit status, what it sent, and the seconds since an epoch."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    given = (sender, folder, name, models, *kill_at)
    process = CONTEXT.Process(target=child, args=given)
    process.start()
    sender.close()
    found, began = [], time.monotonic()
    try:
        while len(found) < 2 or receiver.poll(began + seconds - time.monotonic()):
            found.append(receiver.recv())
            if len(found) == 2:
                began = time.monotonic()
        process.kill()
    except EOFError:
        pass
    process.join()
    return process.exitcode, found, time.monotonic() - began


def faults_after(folder: pathlib.Path, name: str, whole: list[tuple]) -> dict[str, bool]:
    """Trains on from what a kill left; returns what differs from a whole training."""
    copy = pathlib.Path(shutil.copytree(folder, f"{folder}_copy"))
    _, second, _ = run(copy, name, models=2, seconds=0)
    status, found, _ = run(folder, name)
    if status:
        return {"crashed": True}
    *states, end, _ = whole
    (epoch, weights, seeds), *_ = found
    *_, last, ended, _ = found
    kept, seeds_then = {state[1]: state[::2] for state in states}.get(weights, (None, None))
    return {
        "half_written": kept is None,
        "miscounted": kept not in (None, epoch),
        "second_model": not second or second[0][1] != weights,
        "seeds": seeds != seeds_then,
        "history": ended[0] != end[0],
        "stopping": ended[1] != end[1],
        "weights": last[1] != states[-1][1],
    }


def kill(parent: pathlib.Path, name: str) -> dict[str, Any]:
    """Counts the kills after which a training is not as without one."""
    status, whole, seconds = run(parent / "whole", name)
    if status:
        raise RuntimeError(f"A run that was not killed must not fail. Status: {status}")
    (operations,) = whole[-1]
    largest = max(path.stat().st_size for path in parent.rglob("*") if path.is_file())
    draws, counts = random.Random(0), Counter[str]()
    faults = Counter(dict.fromkeys(FAULTS, 0))
    for kind in KINDS:
        while counts[kind] < KILLS:
            chosen: dict[str, Any] = {"seconds": draws.uniform(0, seconds)}
            if kind == "kills_in_writes":
                size = draws.choice([0, int(largest ** draws.random())])
                chosen = {"kill_at": (draws.randint(1, operations), size)}
            folder = pathlib.Path(tempfile.mkdtemp(dir=parent))
            status, _, _ = run(folder, name, **chosen)
            if status > 0:
                raise RuntimeError(f"A run must end by a signal. Status: {status}")
            if status:
                counts[kind] += 1
                faults.update(faults_after(folder, name, whole))
    return {**counts, "faults": faults}


def section(results: pathlib.Path) -> str:
    found = {run["key"][0]: run for run in runs.read(results / "kills.jsonl")}
    rows = [
        [head, *(str((run | run["faults"])[key]) for run in found.values())]
        for key, head in {**KINDS, **FAULTS}.items()
    ]
    table = tables.markdown(["", *(f"`{name}`" for name in found)], rows)
    return f"{table}\n\n{tables.commands(list(found.values()))}"


def main(_arguments: list[str]) -> None:
    path = runs.results_folder(FLAGS.output_dir) / "kills.jsonl"
    for name in NAMES:
        with tempfile.TemporaryDirectory() as scratch:
            found = kill(pathlib.Path(scratch).resolve(), name)
        runs.RunRecords(path).add((name,), {**runs.about("kills"), **found})
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    command.run(main)
