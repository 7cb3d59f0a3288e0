"""What a run is that is killed, and what must be left of it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import zipfile

import h5py  # Comes with Keras.
import numpy as np
import tensorflow as tf

from experiments.common.data import Split
from experiments.few_shot import data
from experiments.kills.killed_run import AFTER, BEFORE, HALF, NEVER, notes

ROOT = pathlib.Path(__file__).parents[2]

#: What no two runs have in common: times, and what depends on them.
TIMES = ("command", "seconds", "images_per_second", "training_seconds", "step_time_ratio")
TIMES += ("evaluation_seconds", "step_time")

#: Files of the campaign's own.
NOTES = ("weights", "killed", "log")

#: Examples in small; {} is the folder that they may write to.
EXAMPLES = {
    "image_classification": (
        *("--train_size=64", "--batch_size=16", "--steps=6", "--save_every=3"),
        *("--num_neighbors=30", "--method=plain", "--method=neighborhoods"),
        *("--model_dir={}/models", "--state_dir={}/unfinished", "--output_dir={}"),
    ),
    "few_shot": (
        *("--dataset=tiny", "--ways=2", "--shots=2", "--queries=3", "--test_episodes=4"),
        *("--training_images=120", "--episodes_per_step=1", "--batch_size=10"),
        *("--save_every=4", "--method=finetuning", "--method=maml", "--nojit_compile"),
        *("--data_file={}/../images.npz", "--state_dir={}/unfinished", "--output_dir={}"),
    ),
    "demo": (
        *("--seeds=1", "--epochs=3", "--train_examples=200"),
        *("--model=linear", "--model=linear_neighborhoods"),
        *("--state_dir={}/unfinished", "--output_dir={}"),
    ),
    "regression": (
        *("--folds=2", "--layers=2", "--units=8", "--decays=0,0.1", "--epochs=40"),
        *("--patience=3", "--temperatures=0.1", "--num_neighbors=20"),
        *("--state_dir={}/unfinished", "--output_dir={}"),
    ),
}


class SurvivalError(Exception):
    """A run that did not survive its kills."""


@dataclasses.dataclass
class Run:
    """An example that writes to a folder of its own, in as many processes as it takes."""

    example: str
    folder: pathlib.Path

    def start(self, stage: str = NEVER) -> subprocess.Popen:
        """Starts a process that kills itself inside a write, if a stage is given."""
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = [each.format(self.folder) for each in EXAMPLES[self.example]]
        module = f"experiments.{self.example}"
        command = [sys.executable, "-m", "experiments.kills.killed_run", str(self.folder)]
        with (self.folder / "log").open("a") as log:
            return subprocess.Popen(
                [*command, stage, module, *flags],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            )

    def end(self, limit: float, stage: str = NEVER) -> int:
        """Runs a process until it ends by itself; returns its exit status."""
        process = self.start(stage)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise SurvivalError(f"stuck for {limit:.0f} seconds") from None

    def require_success(self, status: int) -> None:
        """Raises `SurvivalError` unless a process ended as it should."""
        if status:
            log = (self.folder / "log").read_text()[-2000:]
            raise SurvivalError(f"ended with status {status}: {log}")

    def kill_after(self, seconds: float) -> bool:
        """Kills a process at a moment; returns whether it came before the end."""
        process = self.start()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            # Servers that the example started go with it.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
        return False

    def files(self) -> dict[str, pathlib.Path]:
        """All that the run left, by name."""
        found = {
            path.relative_to(self.folder).as_posix(): path
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }
        return {name: found[name] for name in found if name not in NOTES}

    def content(self) -> dict[str, object]:
        """What is in these files, without times, and the weights of models."""
        found = {name: _content_of(path) for name, path in self.files().items()}
        return {"weights": notes(self.folder / "weights"), **found}

    def compare(self, expected: dict[str, object]) -> None:
        """Raises `SurvivalError` unless the run left what it would have left unharmed."""
        found = self.content()
        if found.keys() != expected.keys():
            raise SurvivalError(f"other files: {sorted(found.keys() ^ expected.keys())}")
        different = [name for name in found if found[name] != expected[name]]
        if different:
            raise SurvivalError(f"other content: {different}")
        left = [path for path in self.folder.rglob("*") if path.name.startswith(".scratch")]
        left += (self.folder / "unfinished").glob("*")
        if left:
            raise SurvivalError(f"left behind: {left}")


def _content_of(path: pathlib.Path) -> object:
    if path.suffix == ".json":
        return _without_times(json.loads(path.read_text()))
    if path.suffix == ".jsonl":
        return _without_times([json.loads(line) for line in path.read_text().splitlines()])
    if path.suffix == ".keras":
        return _arrays_of(path)
    if path.name == "variables.index":
        return _arrays_of_checkpoint(path.with_suffix(""))
    if path.suffix == ".pb" or path.name.startswith("variables.data"):
        return None  # Names of variables, by the number of those that a process made.
    if path.name == "README.md":
        return None  # Times.
    return path.read_bytes()


def _arrays_of(path: pathlib.Path) -> list[tuple]:
    """The weights in a model's file; their names depend on what else a process made."""
    with zipfile.ZipFile(path) as file:
        weights = io.BytesIO(file.read("model.weights.h5"))
    found = []

    def take(name: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset):
            found.append((item.shape, item[()].tobytes()))

    with h5py.File(weights, "r") as file:
        file.visititems(take)
    return sorted(found)


def _arrays_of_checkpoint(prefix: pathlib.Path) -> list[tuple]:
    """The weights in a SavedModel."""
    reader = tf.train.load_checkpoint(str(prefix))
    names = reader.get_variable_to_shape_map()
    arrays = [np.asarray(reader.get_tensor(name)) for name in names]
    return sorted(
        (array.shape, array.tobytes()) for array in arrays if array.dtype.kind in "fiub"
    )


def _without_times(content: object) -> object:
    if isinstance(content, dict):
        kept = {key: content[key] for key in content if key not in TIMES}
        return {key: _without_times(each) for key, each in kept.items()}
    if isinstance(content, list):
        return [_without_times(each) for each in content]
    return content


def killed_at_a_moment(run: Run, moment: float, expected: dict, limit: float) -> bool:
    """Kills a run after so many seconds, and lets it go on; `False` if it ended before.

    Raises:
        SurvivalError: If it does not end as if nothing had happened.
    """
    if not run.kill_after(moment):
        return False
    if {"weights", *run.files()} != expected.keys():  # Else it came after all the work.
        run.require_success(run.end(limit))
    run.compare(expected)
    return True


def killed_in_each_write(
    run: Run, expected: dict, limit: float, most: int | None = None
) -> int:
    """Kills a run inside the first write of each file, or of `most`; returns how many.

    Raises:
        SurvivalError: If it does not end as if nothing had happened.
    """
    kills = 0
    status = -signal.SIGKILL
    while status == -signal.SIGKILL:
        stage = (HALF, BEFORE, AFTER)[kills % 3] if kills != most else NEVER
        status = run.end(limit, stage)
        kills += status == -signal.SIGKILL
    run.require_success(status)
    run.compare(expected)
    return kills


def campaign(
    example: str, kills: int, folder: pathlib.Path, generator: random.Random
) -> dict[str, object]:
    """Kills an example so often, each time in a run of its own, and inside each write."""
    whole = Run(example, folder / "whole")
    start = time.monotonic()
    whole.require_success(whole.end(3000))
    seconds = time.monotonic() - start
    limit = 20 * seconds + 300
    expected = whole.content()
    print(f"{example}: {seconds:.0f} s, {len(expected) - 1} files", flush=True)
    failures: list[str] = []

    def tell(what: str, failure: SurvivalError | None = None) -> None:
        if failure:
            failures.append(f"{what}: {failure}")
        print(f"  {what}: {failure or 'as if uninterrupted'}", flush=True)

    made = 0
    while made < kills:
        moment = generator.uniform(0, seconds)
        run = Run(example, folder / f"killed_after_{moment:.3f}")
        what = f"killed after {moment:.1f} s"
        try:
            if not killed_at_a_moment(run, moment, expected, limit):
                continue
            tell(what)
        except SurvivalError as failure:
            tell(what, failure)
        made += 1
    writes = 0
    try:
        run = Run(example, folder / "killed_in_writes")
        writes = killed_in_each_write(run, expected, limit)
        tell(f"killed inside each of {writes} writes")
    except SurvivalError as failure:
        tell("killed inside each write", failure)
    return {
        "example": example,
        "seconds": round(seconds, 1),
        "random_kills": made,
        "kills_in_writes": writes,
        "failures": failures,
    }


def write_images(path: pathlib.Path) -> None:
    """A few-shot image set: classes of a brightness each."""
    rng = np.random.default_rng(0)
    parts = {}
    for name, first, count in (("train", 0, 6), ("validation", 6, 3), ("test", 9, 3)):
        labels = np.repeat(np.arange(first, first + count), 20)
        noise = rng.integers(0, 15, (len(labels), 16, 16, 1))
        images = 20 * labels[:, None, None, None] + noise
        parts[name] = Split(images.astype("uint8"), labels)
    data.save(data.FewShotData(**parts), str(path))
