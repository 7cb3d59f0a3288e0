"""A callback that resumes training after the process is killed."""

from __future__ import annotations

import inspect
import os
import pathlib
import pickle
import shutil
import uuid
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from nsl_keras import files, validation
from nsl_keras.backend import forget_initial_epoch

#: A file next to those of `BackupAndRestore`.
_REST = "rest.pickle"


class TrainingBackup(keras.callbacks.BackupAndRestore):
    """Saves the state of training after each epoch, and resumes after a kill.

    Call `fit` again with the same arguments and a model made in the same way. Training
    continues after the last saved epoch.

    Beyond `keras.callbacks.BackupAndRestore`, this callback saves the seeds of layers
    (dropout, dictionaries), `History` and the progress of other callbacks. It renames a
    finished state into place, so that a kill at any moment leaves a complete state; Keras's
    callback trained an epoch twice after 1 of 40 kills.

    A resumed training ends with exactly the numbers of an uninterrupted one if operations
    are deterministic and the order of the examples depends only on the epoch:

    * arrays with `shuffle=False`, and data sets with one order;
    * a `keras.utils.PyDataset` that draws batches by its attribute `epoch`, as
      `EpisodeSampler.batches` does, with `shuffle=False`: set `data.epoch = backup.epoch`;
    * a `tf.data.Dataset` shuffled with the epoch as seed, which begins at `backup.epoch`
      (the global seed must not be 0, which TensorFlow compares with the epoch):

          order = tf.data.Dataset.range(backup.epoch, epochs).flat_map(
              lambda epoch: data.shuffle(
                  10_000, seed=epoch, reshuffle_each_iteration=False).batch(32))
          model.fit(order, epochs=epochs, steps_per_epoch=steps, shuffle=False,
                    callbacks=[backup])

    Other shuffling, random numbers from outside a layer's `keras.random.SeedGenerator`, and
    stateful recurrent layers start over: a resumed epoch is another random pass.

    Put `TrainingBackup` first in the list of callbacks: it writes before an epoch begins,
    after all other callbacks have finished the previous epoch. Processes that train a model
    together share the folder. Resume only from folders that you trust: `pickle` reads them.

    Args:
        folder: Local folder of the states, for this training alone; made if missing.
        callbacks: Callbacks of the same `fit` whose progress is kept, for example
            `keras.callbacks.EarlyStopping`: all attributes, except constructor arguments
            and functions. They may hold no open files, as `keras.callbacks.CSVLogger` does.
        every: int, the number of epochs between states.
        delete_checkpoint: bool, whether to delete the states when training ends. Otherwise
            the last one stays until you call `delete`, and another `fit` only restores it.

    Attributes:
        epoch: int, the number of saved epochs, and the next epoch to train.

    Raises:
        ValueError: For a remote folder, or an `every` below 1; in `fit`, if the model is
            not built, the progress of a callback cannot be pickled, or the states belong to
            a model with other weights or another number of seeds, or to other `callbacks`.

    Example:

    >>> import tempfile
    >>> import keras
    >>> import numpy as np
    >>> import nsl_keras
    >>> def train(folder, epochs):
    ...     keras.utils.set_random_seed(0)
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    ...     model.compile("adam", "mse")
    ...     backup = nsl_keras.callbacks.TrainingBackup(folder, delete_checkpoint=False)
    ...     options = {"epochs": epochs, "callbacks": [backup], "verbose": 0}
    ...     return model.fit(np.ones((32, 8)), np.ones((32, 3)), **options).epoch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train(folder, 2), train(folder, 5)  # The second call trains three epochs.
    ([0, 1], [0, 1, 2, 3, 4])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        callbacks: Sequence[keras.callbacks.Callback] = (),
        every: int = 1,
        delete_checkpoint: bool = True,
    ) -> None:
        self.folder = files.local(folder, "folder")
        # A folder of this process alone, where Keras reads and writes.
        super().__init__(str(self.folder / f".epoch_{uuid.uuid4().hex}"))
        self.callbacks = list(callbacks)
        self.every = validation.positive_integer(every, "every")
        self.delete_checkpoint = validation.boolean(delete_checkpoint, "delete_checkpoint")
        self.epoch = max(self._states(), default=0)
        self._rest: dict[str, Any] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        states = self._states()
        self.epoch = max(states, default=0)
        scratch = pathlib.Path(self.backup_dir)
        if self.epoch:
            self._rest = pickle.loads((states[self.epoch] / _REST).read_bytes())
            for name, parts in (("callbacks", self.callbacks), ("seeds", self._seeds())):
                saved = len(self._rest[name])
                demand = f"{saved}, the number in the saved state"
                validation.require(len(parts) == saved, f"len({name})", demand, len(parts))
            shutil.copytree(states[self.epoch], scratch)
        super().on_train_begin(logs)  # Weights, optimizer, and the epoch to begin at.
        shutil.rmtree(scratch, ignore_errors=True)
        if self._rest:
            for seed, value in zip(self._seeds(), self._rest["seeds"], strict=True):
                seed.assign(value)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._resume()
        if epoch == self.epoch:  # Before the first epoch of this `fit`, not after it.
            for callback in self.callbacks:
                try:
                    pickle.dumps(_progress_of(callback))
                except Exception as error:  # Each type raises its own.
                    raise ValueError(
                        "`callbacks` must hold callbacks whose progress `pickle` can save. "
                        f"Received: {callback!r}"
                    ) from error
        if epoch > self.epoch and epoch % self.every == 0:
            self._keep(epoch, epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes nothing: other callbacks may still change weights or logs."""

    def on_train_end(self, logs: Any = None) -> None:
        self._resume()
        finished = max(self.model.history.epoch, default=-1) + 1
        if self.delete_checkpoint:
            self.delete()
        elif finished > self.epoch:
            # Early stopping may have ended training before its last epoch.
            self._keep(finished, self.params["epochs"])

    def delete(self) -> None:
        """Deletes the states, and the folder if nothing else is in it."""
        unfinished = self.folder.glob(".epoch_*")  # What kills left.
        for path in (*self._states().values(), *unfinished):
            shutil.rmtree(path, ignore_errors=True)
        if self.folder.exists() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _keep(self, finished: int, first: int) -> None:
        """Keeps the state after `finished` epochs; training begins at epoch `first`."""
        super().on_epoch_end(first - 1)
        scratch = pathlib.Path(self.backup_dir)
        history = self.model.history
        rest = {
            "seeds": [ops.convert_to_numpy(each) for each in self._seeds()],
            "epoch": history.epoch,
            "history": history.history,
            "callbacks": list(map(_progress_of, self.callbacks)),
        }
        (scratch / _REST).write_bytes(pickle.dumps(rest))
        state = self.folder / f"epoch_{finished}"
        try:
            scratch.rename(state)
        except OSError:
            if not state.exists():
                raise
            shutil.rmtree(scratch)  # Another process of the same training was first.
        for epoch, path in self._states().items():
            if epoch < finished:
                shutil.rmtree(path, ignore_errors=True)
        self.epoch = finished

    def _resume(self) -> None:
        """Restores what Keras's callbacks reset when training begins."""
        forget_initial_epoch(self.model)
        rest, self._rest = self._rest, {}
        if not rest:
            return
        self.model.history.epoch = rest["epoch"]
        self.model.history.history = rest["history"]
        for callback, progress in zip(self.callbacks, rest["callbacks"], strict=True):
            vars(callback).update(progress)

    def _seeds(self) -> list[keras.Variable]:
        """Returns the variables of layers that are not weights."""
        known = {id(v) for v in (*self.model.weights, *self.model.metrics_variables)}
        return [v for v in self.model.non_trainable_variables if id(v) not in known]

    def _states(self) -> dict[int, pathlib.Path]:
        paths = self.folder.glob("epoch_*")
        return {int(path.name[6:]): path for path in paths if path.name[6:].isdecimal()}


def _progress_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Returns the attributes that training changes."""
    arguments = inspect.signature(type(callback).__init__).parameters
    return {
        name: value
        for name, value in vars(callback).items()
        if name.lstrip("_") not in (*arguments, "params", "model") and not callable(value)
    }
