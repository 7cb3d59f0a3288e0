"""A callback that resumes training after the process is killed."""

from __future__ import annotations

import hashlib
import inspect
import io
import itertools
import json
import os
import pathlib
import re
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import begin_fit_at, is_first_process
from nsl_keras.training import files

#: The newest state and the one before.
_KEPT = 2
#: In the `params` that the callbacks of one list share while their training begins.
_BEGUN = "training_backup"


def require_before_backup(callback: keras.callbacks.Callback) -> None:
    """Raises in `on_train_begin` if a `TrainingBackup` comes before a callback."""
    if _BEGUN in (callback.params or {}):
        name = type(callback).__name__
        raise ValueError(
            f"`callbacks` must have `TrainingBackup` after `{name}`, whose work at the "
            "end of an epoch would be lost."
        )


class TrainingBackup(keras.callbacks.Callback):
    """Saves the state of training to a folder, and resumes after the process is killed.

    Call `fit` again with the same arguments and a model made in the same way: training
    begins after the last kept epoch, and `History` holds all epochs. Weights, optimizer,
    seeds of layers (dropout, dictionaries), epoch, step and the logs of all epochs are one
    file, so that a kill at any moment leaves a complete state. If a file is damaged later,
    training continues from the previous state, with a warning.

    A resumed training ends with the same numbers as an uninterrupted one, to the last
    digit, if operations are deterministic and the order of the examples depends only on
    the epoch:

    * arrays with `shuffle=False`, and data sets with one order;
    * a `keras.utils.PyDataset` that draws batches by its attribute `epoch`, as
      `EpisodeSampler.batches` does, with `shuffle=False`: give it as `data`;
    * a `tf.data.Dataset` shuffled with the epoch as seed, that begins at `backup.epoch`
      (not with a global seed of 0, which TensorFlow compares with the epoch):

          order = tf.data.Dataset.range(backup.epoch, epochs).flat_map(
              lambda epoch: data.shuffle(
                  10_000, seed=epoch, reshuffle_each_iteration=False).batch(32))
          model.fit(order, epochs=epochs, steps_per_epoch=steps, shuffle=False,
                    callbacks=[backup])

    Keras's own shuffling of arrays, `shuffle` with a fixed seed, and random numbers from
    outside a layer's `keras.random.SeedGenerator` start over: each resumed epoch is
    a random pass over the data, but a different one. So do stateful recurrent layers.

    Put `TrainingBackup` last in the list of callbacks: a resumed training loses what later
    callbacks do to weights or logs at the end of an epoch. The callbacks of this package
    raise an error if they come after it.

    States are kept after epochs. Divide long epochs with `steps_per_epoch`. Processes that
    train a model together share the folder: the first one writes, and all of them read.
    `keras.callbacks.BackupAndRestore` keeps neither seeds nor `History`, and a kill while
    it writes can repeat an epoch or make every later start fail.

    Args:
        folder: Folder of the states, for this training alone; made if missing.
        data: Data set whose attribute `epoch` is set at the start of each epoch, or `None`.
        callbacks: Callbacks of the same `fit` whose progress is kept, for example
            `keras.callbacks.EarlyStopping`: the attributes, other than constructor
            arguments, that hold numbers, strings, arrays or lists of them, private ones
            included.
        every: int, the number of epochs between states. The last one is always kept.
        delete_at_end: bool, whether the states are deleted when training ends. Otherwise
            call `delete` once the model is saved; until then, `fit` only restores the
            final model.

    Attributes:
        epoch: int, the number of epochs that are finished and kept: the next one to train.
        history: dict of the logs of all epochs, as `History.history`.

    Raises:
        ValueError: For arguments outside the ranges above, or a remote folder; in `fit`, if
            the folder holds states of another model, or one of several optimizers of the
            model is not built.
        OSError: In `fit`, if the folder cannot be written to or its disk is too full.

    Example:

    >>> import tempfile
    >>> import keras
    >>> import numpy as np
    >>> import nsl_keras
    >>> def make_model():
    ...     keras.utils.set_random_seed(0)
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    ...     model.compile("adam", "mse")
    ...     return model
    >>> x, y = np.ones((32, 8)), np.ones((32, 3))
    >>> class Killed(keras.callbacks.Callback):
    ...     def on_epoch_begin(self, epoch, logs=None):
    ...         if epoch == 2:
    ...             raise KeyboardInterrupt
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     backup = nsl_keras.callbacks.TrainingBackup(folder)
    ...     try:
    ...         make_model().fit(x, y, epochs=5, callbacks=[Killed(), backup], verbose=0)
    ...     except KeyboardInterrupt:
    ...         print("killed")
    ...     backup = nsl_keras.callbacks.TrainingBackup(folder)
    ...     print("goes on at epoch", backup.epoch)
    ...     history = make_model().fit(x, y, epochs=5, callbacks=[backup], verbose=0)
    killed
    goes on at epoch 2
    >>> history.epoch, len(history.history["loss"])
    ([0, 1, 2, 3, 4], 5)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        data: Any = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        every: int = 1,
        delete_at_end: bool = True,
    ) -> None:
        super().__init__()
        if data is not None and not hasattr(data, "epoch"):
            raise ValueError(
                "`data` must have an attribute `epoch`, on which its order depends. "
                f"Received: a {type(data).__name__}"
            )
        self.folder = files.local_folder(folder)
        self.data = data
        self.callbacks = list(callbacks)
        self.every = validation.positive_integer(every, "every")
        self.delete_at_end = delete_at_end
        self.history: dict[str, list[Any]] = {}
        self._epochs: list[int] = []
        self._writes = True
        self._damaged: list[pathlib.Path] = []
        # Read here, so that data sets can begin at `epoch`.
        self._found = self._newest()
        self.epoch = self._found[0]["epoch"] if self._found else 0

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.model.built:
            raise ValueError(
                "`TrainingBackup` needs a built model: start it with a `keras.Input`, or "
                "call its `build(input_shape)`, before `fit`. "
                f"Received: unbuilt model {self.model.name!r}"
            )
        self._writes = is_first_process(self.model)
        while self._writes and self._damaged:
            self._damaged.pop().unlink(missing_ok=True)
        found, self._found = self._found or self._newest(), None
        self.epoch, self.history, self._epochs = 0, {}, []
        stopped = False
        if found:
            self._restore(*found)
            stopped = self.model.stop_training = found[0]["stopped"]
        # Even if nothing is new: this shows now whether states can be written.
        self._keep(self.epoch, stopped)
        if self._writes:
            size = self._path(self.epoch).stat().st_size
            files.require_room(self.folder, _KEPT * size)
        begin_fit_at(self.model, self.params["epochs"] if stopped else self.epoch)
        self.params[_BEGUN] = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        begin_fit_at(self.model, 0)
        if self.data is not None:
            self.data.epoch = epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        finished = epoch + 1
        self._epochs.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(np.asarray(value).tolist())
        stopped = bool(self.model.stop_training)
        if stopped or finished % self.every == 0 or finished == self.params["epochs"]:
            self._keep(finished, stopped)

    def on_train_end(self, logs: Any = None) -> None:
        begin_fit_at(self.model, 0)  # Also if no epoch was left.
        if getattr(self.model, "history", None):
            self.model.history.epoch = list(self._epochs)
        if self.delete_at_end:
            self.delete()

    def delete(self) -> None:
        """Deletes the states, and the folder if nothing else is in it."""
        if not self._writes:
            return
        for path in self._paths():
            path.unlink()
        if self.folder.exists() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _keep(self, epoch: int, stopped: bool) -> None:
        """Writes the state after `epoch` epochs, and deletes all but the previous one."""
        variables = _variables_of(self.model)
        # Every process reads the variables, since some read them together.
        arrays = [_storable(each) for each in variables]
        records = {
            "epoch": epoch,
            "stopped": stopped,
            "epochs": self._epochs,
            "history": self.history,
            "variables": [_described(each) for each in variables],
            "callbacks": [_progress_of(each, arrays) for each in self.callbacks],
        }
        if self._writes:
            with files.replacing(self._path(epoch)) as scratch:
                scratch.write_bytes(_as_bytes(records, arrays))
            older = [path for path in self._paths() if path != self._path(epoch)]
            for path in older[: 1 - _KEPT]:
                path.unlink()
        self.epoch = epoch

    def _restore(self, records: dict[str, Any], arrays: list[np.ndarray]) -> None:
        variables = _variables_of(self.model)
        pairs = itertools.zip_longest(records["variables"], map(_described, variables))
        for kept, own in pairs:
            if kept is None or own is None or kept[1:] != own[1:]:
                raise ValueError(
                    "`folder` must hold states of this model, compiled in the same way. "
                    f"Received: folder={str(self.folder)!r}, there {kept}, here {own}"
                )
        if len(records["callbacks"]) != len(self.callbacks):
            raise ValueError(
                "`callbacks` must be those that the state was kept with. Received: "
                f"{len(self.callbacks)} callbacks, there {len(records['callbacks'])}"
            )
        for variable, array in zip(variables, arrays, strict=False):
            variable.assign(array)
        for callback, progress in zip(self.callbacks, records["callbacks"], strict=True):
            for name, value in progress.items():
                setattr(callback, name, _decoded(value, arrays))
        self.epoch, self._epochs = records["epoch"], records["epochs"]
        self.history = records["history"]
        if getattr(self.model, "history", None):
            # Copies: Keras appends to its own lists.
            self.model.history.history = {
                name: list(values) for name, values in self.history.items()
            }

    def _newest(self) -> tuple[dict[str, Any], list[np.ndarray]] | None:
        """Returns the newest whole state, if there is one, and notes damaged ones."""
        for path in reversed(self._paths()):
            state = _from_bytes(path.read_bytes())
            if state is not None:
                return state
            warnings.warn(
                f"{path} is damaged: training continues from the state before it, or "
                "begins again if there is none.",
                stacklevel=3,
            )
            self._damaged.append(path)
        return None

    def _path(self, epoch: int) -> pathlib.Path:
        return self.folder / f"epoch_{epoch}.state"

    def _paths(self) -> list[pathlib.Path]:
        """The existing states, the newest last."""
        found = [
            (int(match[1]), path)
            for path in self.folder.glob("epoch_*.state")
            if (match := re.fullmatch(r"epoch_(\d+)\.state", path.name))
        ]
        return [path for _, path in sorted(found)]


def _as_bytes(records: dict[str, Any], arrays: list[np.ndarray]) -> bytes:
    """Returns a state as the line of its checksum and a file of NumPy's."""
    stream = io.BytesIO()
    np.savez(stream, *arrays, records=np.frombuffer(json.dumps(records).encode(), "uint8"))
    content = stream.getvalue()
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def _from_bytes(written: bytes) -> tuple[dict[str, Any], list[np.ndarray]] | None:
    """Returns a state from its bytes, or `None` if they changed since they were written."""
    checksum, _, content = written.partition(b"\n")
    if checksum != hashlib.sha256(content).hexdigest().encode():
        return None
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        records = json.loads(found["records"].tobytes())
        return records, [found[f"arr_{each}"] for each in range(len(found.files) - 1)]


def _variables_of(model: keras.Model) -> list[keras.Variable]:
    """Returns all variables that training changes, in a reproducible order."""
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    # A model with a training step of its own may have several.
    optimizers = [x for x in vars(model).values() if isinstance(x, keras.Optimizer)]
    if not all(each.built for each in optimizers):
        raise ValueError(
            "Every optimizer of the model must be built before `fit`, or a kept state has "
            "variables that a new model lacks: call its `build(variables)` in `compile`. "
            f"Received: model {model.name!r}, an optimizer of which is not built"
        )
    return [*model.variables, *(v for each in optimizers for v in each.variables)]


def _described(variable: keras.Variable) -> list[Any]:
    """Returns path, shape and dtype, as they are after a round trip through JSON."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return [variable.path, list(variable.shape), dtype]


def _storable(value: Any) -> np.ndarray:
    array = ops.convert_to_numpy(value)
    # NumPy's files do not support bfloat16; float32 holds all of its numbers.
    return array.astype("float32") if array.dtype.kind == "V" else array


def _progress_of(
    callback: keras.callbacks.Callback, arrays: list[np.ndarray]
) -> dict[str, Any]:
    """Returns the attributes that training changes; arrays are added to `arrays`."""
    arguments = inspect.signature(type(callback).__init__).parameters
    return {
        name: _encoded(value, arrays)
        for name, value in vars(callback).items()
        if name.lstrip("_") not in (*arguments, "params") and _is_storable(value)
    }


def _is_storable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_storable, value))
    kinds = (bool, int, float, str, np.generic, np.ndarray)
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return False
    return value is None or isinstance(value, kinds) or ops.is_tensor(value)


def _encoded(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_encoded(each, arrays) for each in value]
    if isinstance(value, (np.ndarray, np.generic)) or ops.is_tensor(value):
        arrays.append(_storable(value))
        return {"array": len(arrays) - 1}
    return value


def _decoded(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decoded(each, arrays) for each in value]
    return arrays[value["array"]] if isinstance(value, dict) else value
