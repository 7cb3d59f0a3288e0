"""Finished runs: a line of JSON each, in a file an experiment, none made twice.

    {"name": "omniglot_cnn4_5way_1shot_tuned", "key": ["maml", 0], "commit": "af1d9f1", ...}

A line has what its run recorded, the name of its setting, its key among the runs of that
setting (method and seed), the commit of the package, and the setting. A kill may cut off
the last line: it does not count, and its run is made again.
"""

import contextlib
import functools
import hashlib
import importlib
import io
import itertools
import json
import pathlib
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras

import nsl_keras

#: What identifies a run among those of its setting, as `("maml", 0)`.
Key = tuple[str | int, ...]

#: Flags that name places on a machine.
_PLACES = ("data_dir", "data_file", "cifar10_file", "state_dir", "model_dir")


def command(module: str) -> str:
    """What was called, as anyone could call it, with another data folder."""
    arguments, given = [], iter(sys.argv[1:])
    for argument in given:
        flag, separate, _ = argument.lstrip("-").partition("=")
        if flag in (*_PLACES, "output_dir", "stop_after_minutes") and not separate:
            next(given, None)  # Its value is the next argument.
        if flag == "output_dir":
            arguments.append("--output_dir=.")  # Where the project's own records are.
        elif flag in _PLACES:
            arguments.append(f"--{flag}={flag.upper()}")
        elif flag != "stop_after_minutes":
            arguments.append(argument)
    return shlex.join(["python", "-m", f"experiments.{module}", *arguments])


def about(module: str) -> dict[str, Any]:
    """The command that runs, and the versions of what it runs on."""
    name = keras.backend.backend()
    versions = {
        "python": platform.python_version(),
        "keras": keras.__version__,
        "backend": f"{name} {importlib.import_module(name).__version__}",
        "nsl_keras": nsl_keras.__version__,
    }
    return {"command": command(module), "versions": versions}


@functools.cache
def commit() -> str | None:
    """The commit of this checkout, `None` where there is none."""
    call = ["git", "rev-parse", "--short=7", "HEAD"]
    options = {"cwd": pathlib.Path(__file__).parent, "stderr": subprocess.DEVNULL}
    try:
        return subprocess.check_output(call, text=True, **options).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path to write to, which takes the file's place once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        scratch = pathlib.Path(folder) / path.name
        yield scratch
        scratch.replace(path)


def write_text(path: pathlib.Path, text: str) -> None:
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def _line(content: Any) -> str:
    return f"{json.dumps(content)}\n"


def read(path: pathlib.Path) -> list[dict]:
    """All records of an experiment; a `ValueError` for a line that is damaged."""
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise ValueError(
            f"{path} must have whole lines. Delete the damaged one, and its run is made "
            f"again. Received: {error}"
        ) from error


class RunRecords:
    """Records of the runs of one setting, which has a name in the file of an experiment.

    The `setting` is what all runs have in common, `None` to read what the file has; the
    states of runs that are not finished are below `states`.
    """

    def __init__(
        self,
        path: pathlib.Path,
        name: str = "",
        setting: dict | None = None,
        states: pathlib.Path | None = None,
    ) -> None:
        self.path, self.name = path, name
        self.states = states or path.with_suffix(".unfinished")
        found = next((run["setting"] for run in self.runs if "setting" in run), None)
        self.setting = found if setting is None else setting
        if found is not None and (different := differences(found, self.setting)):
            raise ValueError(
                f"{path} holds runs of another setting: pairs of (there, here) are "
                f"{different}. Write to another `output_dir`."
            )

    @property
    def runs(self) -> list[dict]:
        return [run for run in read(self.path) if run["name"] == self.name]

    def state(self, key: Key) -> pathlib.Path:
        """The folder of the state of a run that is not finished."""
        return self.states / "_".join(str(part).replace("/", "_") for part in key)

    def holds(self, key: Key) -> bool:
        return list(key) in [run["key"] for run in self.runs]

    def add(self, key: Key, record: dict) -> None:
        """Writes the record of a run in place of an older one, and deletes its state."""
        own: dict[str, Any] = {"name": self.name, "key": list(key)}
        line = {**own, "commit": commit(), **record, **own}
        if self.setting is not None:
            line.setdefault("setting", self.setting)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        others = [run for run in read(self.path) if {**run, **own} != run]
        if "".join(map(_line, others)) == self.path.read_text():
            # One write: other processes may add their runs to the same file.
            with self.path.open("ab", buffering=0) as file:
                file.write(_line(line).encode())
        else:
            write_text(self.path, "".join(map(_line, [*others, line])))
        remove_state(self.state(key))


def differences(there: dict, here: dict) -> dict[str, tuple]:
    """What two settings differ in, by name: pairs of (there, here)."""
    there, here = (json.loads(json.dumps(each)) for each in (there, here))  # No tuples.
    return {
        key: (there.get(key), here.get(key))
        for key in {*there, *here}
        if there.get(key) != here.get(key)
    }


def all_of(path: pathlib.Path) -> list[RunRecords]:
    return [RunRecords(path, name) for name in sorted({run["name"] for run in read(path)})]


def clear(path: pathlib.Path, name: str) -> None:
    left = [run for run in read(path) if run["name"] != name]
    write_text(path, "".join(map(_line, left)))


def every(*parts: Iterable[str | int | float]) -> list[Key]:
    """Keys of all names with all seeds, which come last; those of the first seed first."""
    *names, seeds = parts
    return [(*key, int(seed)) for seed, *key in itertools.product(seeds, *names)]


def run_all(records: RunRecords, keys: Iterable[Key], run: Callable[..., dict]) -> None:
    """Makes every run that has no record yet; `run` gets the parts of its key."""
    # What keeps records from being written shows before the runs.
    records.path.parent.mkdir(parents=True, exist_ok=True)
    for key in keys:
        title = ", ".join(map(str, key))
        if records.holds(key):
            # A kill may have come between the record and this.
            remove_state(records.state(key))
            print(f"\n{title}: finished before", flush=True)
            continue
        print(f"\n{title}", flush=True)
        records.add(key, run(*key))


def states_folder(state_dir: str, setting: Any) -> pathlib.Path:
    """Where unfinished runs are kept: no two settings go on with each other's states."""
    digest = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:12]
    return pathlib.Path(state_dir).expanduser() / digest


def remove_state(folder: pathlib.Path) -> None:
    """Deletes the state of a run at once, and the `states_folder` that it leaves empty."""
    if folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            folder.rename(f"{scratch}/{folder.name}")
    with contextlib.suppress(OSError):  # It holds others, or is gone.
        folder.parent.rmdir()


def results_folder(output_dir: str) -> pathlib.Path:
    return pathlib.Path(output_dir).expanduser() / "results"


def write_figures(folder: pathlib.Path, figures: Mapping[str, Any]) -> None:
    """Writes pictures by name, in few colors, closes them, and says so."""
    import matplotlib.pyplot as plt
    from PIL import Image

    for name, figure in figures.items():
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=90)
        with replacing(folder / f"{name}.png") as scratch:
            Image.open(drawn).convert("RGB").quantize(256).save(scratch, optimize=True)
        plt.close(figure)
        print(f"Wrote {folder / name}.png")
