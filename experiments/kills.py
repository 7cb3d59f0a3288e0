"""Kills trainings and exports, and looks at what a later process finds.

    python -m experiments.kills --output_dir=.     # twenty minutes on one core

Each training keeps its state after every epoch, with one of `CALLBACKS`. It is killed at
random moments, and inside writes: at a file operation, or in the write that makes a file
longer than a random size. Another process then trains to the end. Exports are
killed likewise, and each version that they left is loaded. Writes results/kills.jsonl below
--output_dir, a line for each callback and one for exports. Needs Linux and TensorFlow, and
for `OrbaxCheckpoint` the package orbax-checkpoint.
"""

from __future__ import annotations

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
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import keras
import numpy as np
from absl import flags

import nsl_keras
from experiments.common import command, runs, tables

FLAGS = flags.FLAGS
EPOCHS = 20

Callbacks = list[keras.callbacks.Callback]

# Each process is forked from one that has imported all of this and computed nothing.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tensorflow", "experiments.kills"])


def ours(
    model: keras.Model, folder: pathlib.Path, kept: Callbacks
) -> tuple[Callbacks, int]:
    return [nsl_keras.callbacks.TrainingBackup(folder, kept, delete_checkpoint=False)], 0


def backup_and_restore(
    model: keras.Model, folder: pathlib.Path, kept: Callbacks
) -> tuple[Callbacks, int]:
    options = {"double_checkpoint": True, "delete_checkpoint": False}
    return [keras.callbacks.BackupAndRestore(str(folder), **options)], 0


def orbax(
    model: keras.Model, folder: pathlib.Path, kept: Callbacks
) -> tuple[Callbacks, int]:
    """The callback only writes: whoever resumes loads the newest step and counts on."""
    callback = keras.callbacks.OrbaxCheckpoint(str(folder))
    newest = callback.checkpointer.latest
    if newest is None:
        return [callback], 0
    model.load_weights(str(folder))
    return [callback], newest.step + 1


CALLBACKS = {
    "TrainingBackup": ours,
    "BackupAndRestore": backup_and_restore,
    "OrbaxCheckpoint": orbax,
}

#: What may go wrong after a kill, as the heads of columns.
FAULTS = {
    "crashed": "could not start again",
    "half_written": "loaded half a state",
    "miscounted": "counted epochs that the weights lack, or had already",
    "second_model": "did not load into the second model of a process",
    "seeds": "other seeds",
    "history": "`History` without the first epochs",
    "stopping": "`EarlyStopping` from its start",
    "weights": "other weights in the end",
}


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


def train(out: Connection, folder: pathlib.Path, name: str, models: int = 1) -> None:
    """Trains the last of some models, from what an earlier process left in the folder."""
    model = [make() for _ in range(models)][-1]
    random = np.random.default_rng(0)
    x, y = random.normal(size=(64, 16)).astype("float32"), random.integers(5, size=64)
    stopping = keras.callbacks.EarlyStopping("loss", patience=EPOCHS, mode="max")
    callbacks, first = CALLBACKS[name](model, folder, [stopping])
    history = model.fit(
        x,
        y,
        epochs=EPOCHS,
        initial_epoch=first,
        shuffle=False,
        callbacks=[stopping, *callbacks, Report(out)],
        verbose=0,
    )
    out.send((history.epoch, stopping.wait))


def export(out: Connection, folder: pathlib.Path) -> None:
    model = keras.Sequential([keras.Input((8,)), nsl_keras.layers.CosineDense(3)])
    for version in range(1, 4):
        out.send(version)
        nsl_keras.export.save_model(model, folder / str(version))


def child(
    out: Connection, folder: pathlib.Path, operations: int, size: int, *given: Any
) -> None:
    """Calls a function; after some file operations dies, at once or in a longer write."""
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
    function, *arguments = given
    function(out, folder, *arguments)
    out.send((seen,))


def run(
    folder: pathlib.Path,
    *given: Any,
    seconds: float = 1e5,
    operations: int = 0,
    size: int = 0,
) -> tuple[int, list[Any], float]:
    """Returns a process's exit status, what it sent, and its seconds since the second."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=child, args=(sender, folder, operations, size, *given))
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


def killed(
    parent: pathlib.Path, look: Callable[[pathlib.Path, list], Any], *given: Any
) -> tuple[list[Any], dict[str, int]]:
    """Runs a function whole, then kills it in folder after folder, and looks at each."""
    status, whole, seconds = run(parent / "whole", *given)
    if status:
        raise RuntimeError(f"A run that was not killed must not fail. Status: {status}")
    (operations,) = whole.pop()
    largest = max(path.stat().st_size for path in parent.rglob("*") if path.is_file())
    draws, counts = random.Random(0), Counter[str]()
    for kind in ("kills", "kills_in_writes"):
        while counts[kind] < FLAGS.kills:
            chosen: dict[str, Any] = {"seconds": draws.uniform(0, seconds)}
            if kind == "kills_in_writes":
                size = draws.choice([0, int(largest ** draws.random())])
                chosen = {"operations": draws.randint(1, operations), "size": size}
            folder = pathlib.Path(tempfile.mkdtemp(dir=parent))
            status, found, _ = run(folder, *given, **chosen)
            if status > 0:
                raise RuntimeError(f"A run must end by a signal. Status: {status}")
            if status:
                counts[kind] += 1
                look(folder, found)
    return whole, counts


def kill_trainings(parent: pathlib.Path, name: str) -> dict[str, Any]:
    """Counts after how many kills a training goes on otherwise than without one."""
    after: list[tuple] = []

    def look(folder: pathlib.Path, before: list) -> None:
        copy = pathlib.Path(shutil.copytree(folder, f"{folder}_copy"))
        second = run(copy, train, name, 2, seconds=0)[1]
        after.append((before, second, *run(folder, train, name)))

    (*states, end), counts = killed(parent, look, train, name)
    seeds_of = {weights: (epoch, seeds) for epoch, weights, seeds in states}
    faults, lost = Counter[str](), 0
    for before, second, status, found, _ in after:
        if status:
            faults["crashed"] += 1
            continue
        epoch, weights, seeds = found[0]
        *_, last, ended, _ = found
        kept, their_seeds = seeds_of.get(weights, (None, None))
        finished = [each[0] for each in before if len(each) == 3]
        lost = max(lost, max(finished, default=0) - epoch)
        faults += Counter(
            half_written=kept is None,
            miscounted=kept is not None and kept != epoch,
            second_model=not second or second[0][1] != weights,
            seeds=seeds != their_seeds,
            history=ended[0] != end[0],
            stopping=ended[1] != end[1],
            weights=last[1] != states[-1][1],
        )
    return {
        **counts,
        "faults": {each: faults[each] for each in FAULTS},
        "epochs_lost": lost,
    }


def kill_exports(parent: pathlib.Path) -> dict[str, Any]:
    """Loads each version that a killed export left."""
    import tensorflow as tf

    read, failures = 0, []

    def look(folder: pathlib.Path, before: list) -> None:
        nonlocal read
        for path in folder.glob("[0-9]*"):
            read += 1
            try:
                model = tf.saved_model.load(str(path))
                model.serve(np.ones((2, 8), "float32"))
            except Exception as error:
                failures.append(repr(error))

    _, counts = killed(parent, look, export)
    return {**counts, "versions_read": read, "failures": failures}


def section(results: pathlib.Path) -> str:
    found = {run["key"][0]: run for run in runs.read(results / "kills.jsonl")}
    columns = {"kills": "kills at random moments", "kills_in_writes": "kills inside writes"}
    rows = [
        [
            head,
            *(
                str(found[name].get(key, found[name]["faults"].get(key)))
                for name in CALLBACKS
            ),
        ]
        for key, head in {**columns, **FAULTS, "epochs_lost": "most epochs lost"}.items()
    ]
    return tables.markdown(["after a kill", *(f"`{name}`" for name in CALLBACKS)], rows)


def main(_arguments: list[str]) -> None:
    path = runs.results_folder(FLAGS.output_dir) / "kills.jsonl"
    for name in FLAGS.what:
        with tempfile.TemporaryDirectory() as scratch:
            parent = pathlib.Path(scratch).resolve()
            found = (
                kill_exports(parent) if name == "exports" else kill_trainings(parent, name)
            )
        runs.RunRecords(path).add((name,), {**runs.about("kills"), **found})
        print(f"{name}: {found}", flush=True)


if __name__ == "__main__":
    names = [*CALLBACKS, "exports"]
    flags.DEFINE_multi_enum("what", names, names, "What is killed.")
    flags.DEFINE_integer("kills", 20, "Kills of each kind.", 1)
    command.run(main)
