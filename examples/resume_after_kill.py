"""Kills a training run, and resumes it with the same numbers.

The script starts itself three times: for a training that nothing disturbs, for a training
that is killed in its middle by a signal that no process can catch, and for the killed
training again, which continues after the last finished epoch. Then it compares histories.

    python examples/resume_after_kill.py          # 40 seconds on one core
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import keras
from sklearn.datasets import load_digits

import nsl_keras


class Kill(keras.callbacks.Callback):
    """Kills this process in the middle of an epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch, self.now = epoch, False

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch == self.epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.now and batch == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder, epochs, kill_in=None):
    """Trains, or resumes training from the state in `folder`."""
    folder.mkdir(exist_ok=True)
    digits = load_digits()
    keras.utils.set_random_seed(0)
    model = nsl_keras.MetaNeighborhoodModel(
        keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)]),
        nsl_keras.layers.CosineDense(10),
        # Dropout draws random numbers, whose state is saved too.
        nsl_keras.layers.NeighborDictionary(100, dropout=0.3, seed=0),
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    # The first callback in the list. Your folder must outlive the process.
    backup = nsl_keras.callbacks.TrainingBackup(folder / "state", delete_checkpoint=False)
    print("  begins at epoch", backup.epoch, flush=True)
    history = model.fit(
        digits.data.astype("float32") / 16,
        digits.target,
        batch_size=64,
        epochs=epochs,
        shuffle=False,  # The order of the examples must depend on the epoch alone.
        callbacks=[backup, Kill(kill_in)],
        verbose=0,
    )
    (folder / "history.json").write_text(json.dumps(history.history))


def run(folder, epochs, *flags):
    command = [sys.executable, __file__, f"--train={folder}", f"--epochs={epochs}", *flags]
    return subprocess.run(command).returncode


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6, help="at least 2")
    parser.add_argument("--train", type=pathlib.Path, help="train only, in this folder")
    parser.add_argument("--kill_in", type=int, help="the epoch in which the process dies")
    args = parser.parse_args()
    if args.train:
        train(args.train, args.epochs, args.kill_in)
        return

    with tempfile.TemporaryDirectory() as parent:
        undisturbed, killed = (pathlib.Path(parent) / name for name in ("one", "two"))
        print("undisturbed", flush=True)
        run(undisturbed, args.epochs)
        print("killed", flush=True)
        code = run(killed, args.epochs, f"--kill_in={args.epochs // 2}")
        print("  exit status", code, flush=True)
        print("the same training again", flush=True)
        run(killed, args.epochs)
        files = [folder / "history.json" for folder in (undisturbed, killed)]
        one, two = (json.loads(file.read_text())["loss"] for file in files)
    for epoch, losses in enumerate(zip(one, two, strict=True)):
        print("epoch {}: loss {:.8f}, after a kill {:.8f}".format(epoch, *losses))
    print("equal to the last digit:", one == two)
    print("Look at the epoch at which the third process begins, and the losses after it.")


if __name__ == "__main__":
    main()
