"""A callback by which training goes on after its process was killed."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import os
import pathlib
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import begin_fit_at, is_first_process
from nsl_keras.training import files

_HEADER = b"nsl_keras training state 1\n"
_DIGEST_BYTES = 64
#: The newest state and the one before.
_KEPT = 2
#: In the `params` that the callbacks of one list share while their training begins.
_BEGUN = "training_backup"


def require_before_backup(callback: keras.callbacks.Callback) -> None:
    """Raises in `on_train_begin` if a `TrainingBackup` comes before a callback."""
    if _BEGUN in (callback.params or {}):
        name = type(callback).__name__
        raise ValueError(
            f"`callbacks` must have `TrainingBackup` after `{name}`: states would not hold "
            f"what it does at the end of an epoch. Received: `{name}` after it"
        )


class TrainingBackup(keras.callbacks.Callback):
    """Keeps the state of training in a folder, and goes on from it after a kill.

    Call `fit` again as it was called first, with a model made in the same way: training
    begins after the last epoch that was kept, and `History` holds all epochs. Weights, the
    optimizer, the seeds of layers (dropout, dictionaries), epoch, step and the logs of
    all epochs are one file, written aside, put on the disk and renamed: a process may be
    killed at any moment. The state before is kept too. A file that is damaged later, say
    emptied by a crash of the machine, is found by its checksum: training goes on from the
    state before, and a warning says so. A folder that cannot be written to, or a disk
    without room for the states, is an error before the first step.

    A resumed training ends with the same numbers as an uninterrupted one, to the last
    digit, where operations are deterministic and the order of the examples depends on
    nothing but the epoch:

    * arrays with `shuffle=False`, and data sets with one order;
    * a `keras.utils.PyDataset` that draws batches by its attribute `epoch`, as
      `EpisodeSampler.batches` does: give it as `data`;
    * a `tf.data.Dataset` shuffled with the epoch as seed, that begins at `backup.epoch`:

          order = tf.data.Dataset.range(backup.epoch, epochs).flat_map(
              lambda epoch: data.shuffle(
                  10_000, seed=epoch, reshuffle_each_iteration=False).batch(32))
          model.fit(order, epochs=epochs, steps_per_epoch=steps, shuffle=False,
                    callbacks=[backup])

    Keras's own shuffling of arrays, and `shuffle` with a fixed seed, begin their orders
    anew: then each resumed epoch is a random pass over the data, but another one. So do
    random numbers that are drawn without a `keras.random.SeedGenerator` in a layer.

    Put `TrainingBackup` last in the list of callbacks: Keras calls them in its order, and
    what callbacks do at the end of an epoch after the state was written, to weights or
    logs, is lost to a training that is resumed. `EntryStatistics` and
    `DictionaryInitializer` refuse to come after it.

    States are kept after epochs. Where an epoch takes hours, divide it with
    `steps_per_epoch`. Processes that train a model together share the folder: the first one
    writes, and all of them read.

    Works in `fit` on both backends, and in loops of your own, which call it through
    `keras.callbacks.CallbackList(callbacks, model=model, epochs=epochs)`, begin at
    `backup.epoch` and end where `model.stop_training` is true.

    `keras.callbacks.BackupAndRestore` writes weights and epoch one after the other: killed
    in between it trains an epoch twice, and killed in the second write it fails at every
    start. It keeps neither seeds nor `History`.

    Args:
        folder: Folder of the states, for this training alone; made if missing.
        data: Data set whose attribute `epoch` is set at the start of each epoch, or `None`.
        callbacks: Callbacks of the same `fit` whose progress belongs to the state, as
            `keras.callbacks.EarlyStopping`: their attributes that are no arguments of the
            constructor, where these are numbers, strings, arrays or lists of them.
        every: int, the number of epochs between states. The last one is always kept.
        delete_at_end: bool, whether the states are deleted when training ends. Otherwise
            call `delete` once the model is saved; until then `fit` trains no further,
            and gives the model as it ended.

    Attributes:
        epoch: int, the number of epochs that are finished and kept: where training would
            go on.
        history: dict of the logs of all epochs, as `History.history`.

    Raises:
        ValueError: For arguments outside the ranges above; in `fit`, if the folder holds
            states of another model.
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
        if not isinstance(folder, (str, os.PathLike)) or not str(folder):
            raise ValueError(
                f"`folder` must be the path of a folder. Received: folder={folder!r}"
            )
        if data is not None and not hasattr(data, "epoch"):
            raise ValueError(
                "`data` must have an attribute `epoch`, which its order depends on. "
                f"Received: a {type(data).__name__}"
            )
        if not isinstance(callbacks, (list, tuple)) or not all(
            isinstance(each, keras.callbacks.Callback) for each in callbacks
        ):
            raise ValueError(
                "`callbacks` must be a list of callbacks. "
                f"Received: callbacks={callbacks!r}"
            )
        self.folder = pathlib.Path(folder).expanduser()
        self.data = data
        self.callbacks = list(callbacks)
        self.every = validation.positive_integer(every, "every")
        self.delete_at_end = validation.boolean(delete_at_end, "delete_at_end")
        self.history: dict[str, list[Any]] = {}
        self._epochs: list[int] = []
        self._writes = True
        # Read here, so that data sets can begin at `epoch`.
        self._found = self._newest()
        self.epoch = self._found.records["epoch"] if self._found else 0

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.model.built:
            raise ValueError(
                "`TrainingBackup` needs a built model: start it with a `keras.Input`, or "
                "call its `build(input_shape)`, before `fit`. "
                f"Received: unbuilt model {self.model.name!r}"
            )
        self._writes = is_first_process(self.model)
        found, self._found = self._found or self._newest(), None
        self.epoch, self.history, self._epochs = 0, {}, []
        stopped = False
        if found:
            self._restore(found)
            stopped = self.model.stop_training = found.records["stopped"]
            begin_fit_at(self.model, self.params["epochs"] if stopped else self.epoch)
        # Also where nothing is new: what keeps states from being written shows now.
        self._keep(self.epoch, stopped)
        if self._writes:
            size = self._path(self.epoch).stat().st_size
            files.require_room(self.folder, _KEPT * size)
        if self.params:  # A loop of one's own may give none.
            self.params[_BEGUN] = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        begin_fit_at(self.model, 0)
        (self.params or {}).pop(_BEGUN, None)
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
        begin_fit_at(self.model, 0)
        (self.params or {}).pop(_BEGUN, None)  # Also where no epoch was left.
        kept = getattr(self.model, "history", None)
        if kept is not None:
            kept.epoch = list(self._epochs)
        if self.delete_at_end:
            self.delete()

    def delete(self) -> None:
        """Deletes the states, and the folder if nothing else is in it."""
        if not self._writes:
            return
        for path in self._paths():
            files.remove(path)
        if self.folder.exists() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _keep(self, epoch: int, stopped: bool) -> None:
        """Writes the state after `epoch` epochs, and deletes all but the one before."""
        variables = _variables_of(self.model)
        arrays = [_storable(each) for each in variables]
        records = {
            "epoch": epoch,
            "stopped": stopped,
            "epochs": self._epochs,
            "history": self.history,
            "variables": [_described(each) for each in variables],
            "callbacks": [_progress_of(each, arrays) for each in self.callbacks],
        }
        # All processes have read the variables, which some of them do together.
        if not self._writes:
            self.epoch = epoch
            return
        try:
            files.write_bytes(self._path(epoch), _State(records, arrays).as_bytes())
        except OSError as error:
            raise OSError(
                error.errno,
                f"`folder` must take the states of training. Received: "
                f"folder={str(self.folder)!r}, {error.strerror or error}",
            ) from error
        self.epoch = epoch
        older = [path for path in self._paths() if path != self._path(epoch)]
        for path in older[: 1 - _KEPT]:
            files.remove(path)

    def _restore(self, state: _State) -> None:
        records = state.records
        variables = _variables_of(self.model)
        described = [_described(each) for each in variables]
        if [each[1:] for each in described] != [each[1:] for each in records["variables"]]:
            different = next(
                (
                    f"there {there}, here {here}"
                    for there, here in zip(records["variables"], described, strict=False)
                    if there[1:] != here[1:]
                ),
                f"there {len(records['variables'])} variables, here {len(described)}",
            )
            raise ValueError(
                "`folder` must hold states of this model, compiled in the same way. "
                f"Received: folder={str(self.folder)!r}, {different}"
            )
        if len(records["callbacks"]) != len(self.callbacks):
            raise ValueError(
                "`callbacks` must be those that the state was kept with. Received: "
                f"{len(self.callbacks)} callbacks, there {len(records['callbacks'])}"
            )
        for variable, array in zip(variables, state.arrays, strict=False):
            variable.assign(array)
        for callback, progress in zip(self.callbacks, records["callbacks"], strict=True):
            for name, value in progress.items():
                setattr(callback, name, _decoded(value, state.arrays))
        self.epoch = records["epoch"]
        self.history = records["history"]
        self._epochs = records["epochs"]
        # Keras's own goes on with these lists.
        kept = getattr(self.model, "history", None)
        if kept is not None:
            kept.history = {name: list(values) for name, values in self.history.items()}

    def _newest(self) -> _State | None:
        """The newest whole state, if there is one."""
        if self.folder.is_dir():
            files.clean(self.folder)
        damaged: list[pathlib.Path] = []
        for path in reversed(self._paths()):
            state = _State.from_bytes(path.read_bytes())
            if state is not None:
                if damaged:
                    self._warn(damaged, f"training goes on after epoch {_number(path)}")
                return state
            damaged.append(path)
        if damaged:
            self._warn(damaged, "no other one is left: training begins anew")
        return None

    def _warn(self, damaged: list[pathlib.Path], rest: str) -> None:
        names = " and ".join(path.name for path in damaged)
        warnings.warn(f"{names} in {self.folder} is damaged; {rest}.", stacklevel=4)
        for path in damaged:
            files.remove(path)

    def _path(self, epoch: int) -> pathlib.Path:
        return self.folder / f"epoch_{epoch}.state"

    def _paths(self) -> list[pathlib.Path]:
        """The states that are there, the newest last."""
        found = [path for path in self.folder.glob("epoch_*.state") if _number(path) >= 0]
        return sorted(found, key=_number)


class _State(NamedTuple):
    """What is written: records that JSON holds, and arrays."""

    records: dict[str, Any]
    arrays: list[np.ndarray]

    def as_bytes(self) -> bytes:
        stream = io.BytesIO()
        records = np.frombuffer(json.dumps(self.records).encode(), "uint8")
        np.savez(stream, *self.arrays, records=records)
        content = stream.getvalue()
        return _HEADER + hashlib.sha256(content).hexdigest().encode() + content

    @classmethod
    def from_bytes(cls, content: bytes) -> _State | None:
        """The state, or `None` for bytes that are not what was written."""
        start = len(_HEADER) + _DIGEST_BYTES
        digest = hashlib.sha256(content[start:]).hexdigest().encode()
        if content[:start] != _HEADER + digest:
            return None
        with np.load(io.BytesIO(content[start:]), allow_pickle=False) as found:
            records = json.loads(found["records"].tobytes())
            count = len(found.files) - 1
            return cls(records, [found[f"arr_{number}"] for number in range(count)])


def _number(path: pathlib.Path) -> int:
    """The number of epochs in a file's name; -1 for other files."""
    match = re.fullmatch(r"epoch_(\d+)\.state", path.name)
    return int(match[1]) if match else -1


def _variables_of(model: keras.Model) -> list[keras.Variable]:
    """All that training changes, in an order that the same code makes again."""
    optimizer = model.optimizer
    if optimizer is None:
        return list(model.variables)
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return [*model.variables, *optimizer.variables]


def _described(variable: keras.Variable) -> list[Any]:
    """Path, shape and dtype, as they read after a round trip through JSON."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return [variable.path, list(variable.shape), dtype]


def _storable(value: Any) -> np.ndarray:
    array = ops.convert_to_numpy(value)
    # NumPy's files know no bfloat16; float32 holds all of its numbers.
    return array.astype("float32") if array.dtype.kind == "V" else array


def _progress_of(
    callback: keras.callbacks.Callback, arrays: list[np.ndarray]
) -> dict[str, Any]:
    """The attributes of a callback that training changes; arrays are added to `arrays`."""
    arguments = inspect.signature(type(callback).__init__).parameters
    progress = {}
    for name, value in vars(callback).items():
        if name.startswith("_") or name in arguments or name == "params":
            continue
        if _is_storable(value):
            progress[name] = _encoded(value, arrays)
    return progress


def _is_storable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_storable, value))
    kinds = (bool, int, float, str, np.generic, np.ndarray)
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
