"""Finished runs: a folder for a setting, in it a JSON file a run, none made twice.

results/few_shot/omniglot_cnn4_5way_1shot_tuned/setting.json     what its runs share
results/few_shot/omniglot_cnn4_5way_1shot_tuned/maml_0.json      method and seed

The state of a run that is not finished is in a folder of its own, which goes when the
record is there. Every file is whole at every moment: a run may be killed at any.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import pathlib
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras

import nsl_keras
from experiments.common import strategies
from nsl_keras.training import files

#: What tells a run from the others of its setting, as `("maml", 0)`.
Key = tuple[str | int, ...]

_SETTING = "setting.json"

#: Flags that name places on a machine.
_PLACES = ("data_dir", "data_file", "state_dir", "model_dir")


def command(module: str) -> str:
    """What was called, as anyone could call it: with a data folder of their own."""
    arguments = []
    given = iter(sys.argv[1:])
    for argument in given:
        flag, separate, _ = argument.lstrip("-").partition("=")
        if flag in (*_PLACES, "stop_after_minutes") and not separate:
            next(given, None)  # Its value is the next argument.
        if flag in _PLACES:
            arguments.append(f"--{flag}={flag.upper()}")
        elif flag != "stop_after_minutes":
            arguments.append(argument)
    return shlex.join(["python", "-m", f"experiments.{module}", *arguments])


def versions() -> dict[str, str]:
    """What ran: versions of Python, Keras, the backend and this package."""
    name = keras.backend.backend()
    return {
        "python": platform.python_version(),
        "keras": keras.__version__,
        "backend": f"{name} {importlib.import_module(name).__version__}",
        "nsl_keras": nsl_keras.__version__,
    }


def as_json(content: Any, indent: int = 0) -> str:
    """JSON with a key a line, and lists of numbers on one line."""
    if isinstance(content, Mapping) and content:
        parts = [
            f"{json.dumps(str(k))}: {as_json(content[k], indent + 1)}" for k in content
        ]
        opening, closing = "{", "}"
    elif isinstance(content, list) and any(isinstance(each, Mapping) for each in content):
        parts = [as_json(each, indent + 1) for each in content]
        opening, closing = "[", "]"
    else:
        return json.dumps(content)
    inner = ",\n".join(" " * (indent + 1) + part for part in parts)
    return f"{opening}\n{inner}\n{' ' * indent}{closing}"


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text file in UTF-8."""
    with files.replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def remove(path: pathlib.Path) -> None:
    """Removes a file or a folder, if it exists, all at once."""
    if path.exists():
        with files.scratch_in(path.parent) as folder:
            path.rename(folder / path.name)


def write_json(path: pathlib.Path, content: Any) -> None:
    """Writes a JSON file; on several machines the first worker does."""
    if strategies.is_first_worker():
        write_text(path, as_json(content) + "\n")


def read_json(path: pathlib.Path) -> Any:
    """Reads a JSON file.

    Raises:
        ValueError: If it is damaged, as no kill leaves it.
    """
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{path} must be whole. Delete it, and its run is made again. Received: {error}"
        ) from error


class RunRecords:
    """Records of runs of one setting, each in a file of its own that its key names.

    Args:
        folder: Where the files are.
        setting: What all runs have in common; `None` to read what the folder has. A
            folder of another setting is refused.
        replace: Whether runs that are there already are deleted, whatever their setting.
        states: Below it, the states of runs that are not finished; `None` for runs that
            keep none.

    Raises:
        ValueError: If the folder holds runs of another setting.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        setting: dict | None = None,
        replace: bool = False,
        states: pathlib.Path | None = None,
    ) -> None:
        self.folder = folder
        self.states = states
        if replace and strategies.is_first_worker():
            for path in folder.glob("*.json"):
                path.unlink()
        path = folder / _SETTING
        found = read_json(path) if path.exists() else None
        self.setting = found if setting is None else _as_read(setting)
        if found is None:
            return
        if different := differences(found, self.setting):
            raise ValueError(
                f"{folder} holds runs of another setting: pairs of (there, here) are "
                f"{different}. Write to another `output_dir`."
            )

    @property
    def by_path(self) -> dict[pathlib.Path, dict]:
        """All records by their files, in the order of their keys."""
        paths = [path for path in self.folder.glob("*.json") if path.name != _SETTING]
        return {path: read_json(path) for path in sorted(paths, key=_in_order)}

    @property
    def runs(self) -> list[dict]:
        """All records, in the order of their keys."""
        return list(self.by_path.values())

    def path(self, key: Key) -> pathlib.Path:
        """The file of a run."""
        name = "_".join(re.sub(r"[^\w.=-]+", "_", str(part)) for part in key)
        return self.folder / f"{name}.json"

    def state(self, key: Key) -> pathlib.Path:
        """The folder of the state of a run that is not finished."""
        if self.states is None:
            raise ValueError("`states` must be given for runs that keep their state.")
        return self.states / self.path(key).stem

    def holds(self, key: Key) -> bool:
        """Whether a run is finished."""
        return self.path(key).exists()

    def begin(self) -> None:
        """Writes the setting: what keeps records from being written shows before runs."""
        files.require_room(self.folder)
        if not (self.folder / _SETTING).exists():
            write_json(self.folder / _SETTING, self.setting)

    def add(self, key: Key, record: dict) -> None:
        """Writes the record of a run, and deletes its state."""
        if not (self.folder / _SETTING).exists():
            self.begin()
        write_json(self.path(key), record)
        self.forget(key)

    def forget(self, key: Key) -> None:
        """Deletes the state of a run."""
        if self.states is not None:
            remove_state(self.state(key))


def _as_read(setting: dict) -> dict:
    """A setting as it reads after a round trip: tuples are lists there."""
    return json.loads(json.dumps(setting))


def differences(there: dict, here: dict) -> dict[str, tuple]:
    """What two settings differ in, by name: pairs of (there, here)."""
    there, here = _as_read(there), _as_read(here)
    return {
        key: (there.get(key), here.get(key))
        for key in {*there, *here}
        if there.get(key) != here.get(key)
    }


def _in_order(path: pathlib.Path) -> list:
    """Numbers in names count as numbers: the tenth run comes after the second."""
    parts = re.split(r"(\d+(?:\.\d+)?)", path.stem)
    return [float(part) if part[:1].isdigit() else part for part in parts]


def all_of(folder: pathlib.Path) -> list[RunRecords]:
    """The records of every setting in a folder, by name."""
    return [RunRecords(path.parent) for path in sorted(folder.glob(f"*/{_SETTING}"))]


def every(titles: Mapping[str, str], seeds: Iterable[int | str]) -> dict[Key, str]:
    """Keys and titles of the runs of every method with every seed."""
    return {
        (name, seed): f"{title}, seed {seed}"
        for seed in map(int, seeds)
        for name, title in titles.items()
    }


def run_all(
    records: RunRecords, titles: Mapping[Key, str], run: Callable[..., dict]
) -> None:
    """Makes every run that has no record yet.

    Args:
        records: Where records are kept.
        titles: What the runs are called, by their keys.
        run: A function of the parts of a key, which returns the record.
    """
    records.begin()
    for key, title in titles.items():
        if records.holds(key):
            records.forget(key)  # Where a kill came between the record and this.
            print(f"\n{title}: finished before", flush=True)
            continue
        print(f"\n{title}", flush=True)
        records.add(key, run(*key))
        strategies.wait_for_workers()


def states_folder(state_dir: str, setting: Any) -> pathlib.Path:
    """Where unfinished runs are kept: no two settings go on with each other's states."""
    digest = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:12]
    return pathlib.Path(state_dir).expanduser() / digest


def remove_state(folder: pathlib.Path) -> None:
    """Deletes the state of a run, and the `states_folder` that it leaves empty."""
    if not strategies.is_first_worker():
        return
    remove(folder)
    with contextlib.suppress(OSError):  # It holds others, or is gone.
        folder.parent.rmdir()


def results_folder(output_dir: str) -> pathlib.Path:
    """Where records and pictures are written below the output folder."""
    return pathlib.Path(output_dir).expanduser() / "results"


def write_figures(folder: pathlib.Path, figures: Mapping[str, Any]) -> None:
    """Writes pictures by name, closes them, and says so."""
    import matplotlib.pyplot as plt

    for name, figure in figures.items():
        with files.replacing(folder / f"{name}.png") as scratch:
            figure.savefig(scratch, dpi=150)
        plt.close(figure)
        print(f"Wrote {folder / name}.png")
