"""The file of finished runs: one record a run, so that what is done is not done again."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import platform
import re
import statistics
import sys

import keras

import nsl_keras


def command(module: str) -> str:
    """What was called, as anyone could call it: with a data folder of their own."""
    arguments = " ".join(sys.argv[1:])
    for flag in ("data_dir", "data_file", "state_dir", "model_dir"):
        arguments = re.sub(rf"--?{flag}[= ]\S+", f"--{flag}={flag.upper()}", arguments)
    return f"python -m examples.{module} {arguments}".rstrip()


def versions() -> dict[str, str]:
    """What ran: versions of Python, Keras, the backend and this package."""
    name = keras.backend.backend()
    return {
        "python": platform.python_version(),
        "keras": keras.__version__,
        "backend": f"{name} {importlib.import_module(name).__version__}",
        "nsl_keras": nsl_keras.__version__,
    }


def images_per_second(runs: list[dict]) -> str:
    """The median over runs on accelerators: a CPU's moves with whatever else it does."""
    speeds = [
        run["images_per_second"]
        for run in runs
        if "diverged" not in run
        and not any(device.startswith("cpu") for device in run["devices"])
    ]
    return f"{statistics.median(speeds):,.0f}" if speeds else ""


class RunRecords:
    """Records of runs that differ in method and seed alone, in one JSON file.

    Args:
        path: The file; read if it exists.
        setting: What all runs have in common. A file of another setting is refused.

    Raises:
        ValueError: If the file holds runs of another setting.
    """

    def __init__(self, path: pathlib.Path, setting: dict) -> None:
        self.path = path
        # As it reads after a round trip: tuples are lists there.
        self.setting = json.loads(json.dumps(setting))
        found = self._read()["setting"]
        different = {
            key: (found.get(key), self.setting.get(key))
            for key in {*found, *self.setting}
            if found.get(key) != self.setting.get(key)
        }
        if different:
            raise ValueError(
                f"{path} holds runs of another setting: pairs of (there, here) are "
                f"{different}. Write to another `output_dir`."
            )

    def _read(self) -> dict:
        if not self.path.exists():
            return {"setting": self.setting, "runs": []}
        return json.loads(self.path.read_text())

    @property
    def runs(self) -> list[dict]:
        """All records, in the order in which they were made."""
        return self._read()["runs"]

    def holds(self, method: str, seed: int) -> bool:
        """Whether the run of a method and seed is finished."""
        return any(run["method"] == method and run["seed"] == seed for run in self.runs)

    def add(self, record: dict) -> None:
        """Appends a record; the file is whole at every moment."""
        content = self._read()
        content["runs"].append(record)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        scratch.replace(self.path)
