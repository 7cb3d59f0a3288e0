"""Kills experiments at random moments and at each new file, then resumes them.

    python -m experiments.kills --output_dir=.           # about an hour on two cores
    python -m experiments.kills --example=demo --kills=3

Each must end with the weights, records (without times), models and pictures that an
uninterrupted run leaves, to the last digit. Each new file is one kill, just before it takes
its place, or just after. `exports` are killed while a reader loads each version as
soon as it sees it. Writes results/kills.jsonl below --output_dir, a line an example. Needs
Linux and TensorFlow.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from absl import flags

from experiments.common import command, runs, tables
from experiments.common.data import Split, save_file
from experiments.few_shot.data import FewShotData

FLAGS = flags.FLAGS
ROOT = pathlib.Path(__file__).parents[1]
#: What differs from run to run, by endings of keys in records.
VOLATILE_KEYS = ("command", "seconds", "per_second", "step_time_ratio")
#: Files whose content does, too.
VOLATILE_FILES = ("killed", "log", "README.md", "*.pb", "variables.*")

#: Experiments in small.
EXAMPLES = {
    "image_classification": "--train_size=64 --batch_size=16 --steps=6 --save_every=3 "
    "--num_neighbors=30 --method=plain --method=neighborhoods --model_dir={}/models",
    "few_shot": "--dataset=tiny --ways=2 --shots=2 --queries=3 --test_episodes=4 "
    "--training_images=120 --episodes_per_step=1 --batch_size=10 --save_every=4 "
    "--method=finetuning --method=maml --nojit_compile --data_file={}/../images.npz",
    "demo": "--seeds=1 --epochs=3 --train_examples=200 --model=linear "
    "--model=linear_neighborhoods",
}

EXPORTER = """
import itertools, sys, keras, nsl_keras
model = keras.Sequential([keras.Input((8,)), nsl_keras.layers.CosineDense(3)])
for version in itertools.count(int(sys.argv[2])):
    print("starts", flush=True)
    nsl_keras.export.save_model(model, sys.argv[1], version)
"""


def run(folder: pathlib.Path, stage: str, example: str, *arguments: str) -> None:
    """Runs an example in this process, which kills itself at its next new file.

    The stage is "before" or "after" the file takes its place, or "never". Operations are
    deterministic: two runs are equal to the last digit. FOLDER/weights lists digests of the
    weights after each fit.
    """
    import tensorflow as tf

    tf.config.experimental.enable_op_determinism()
    fit, replace = keras.Model.fit, pathlib.Path.replace
    killed = lines(folder / "killed")

    @functools.wraps(fit)
    def noting_fit(model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        history = fit(model, *args, **kwargs)
        content = b"".join(weights.tobytes() for weights in model.get_weights())
        add_line(folder / "weights", hashlib.sha256(content).hexdigest())
        return history

    def die(now: str, target: pathlib.Path) -> None:
        if now == stage and str(target) not in killed:
            add_line(folder / "killed", str(target))
            os.kill(os.getpid(), signal.SIGKILL)

    def killing_replace(scratch: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        die("before", target)
        replace(scratch, target)
        die("after", target)
        return target

    keras.Model.fit, pathlib.Path.replace = noting_fit, killing_replace
    sys.argv[1:] = arguments
    runpy.run_module(f"experiments.{example}", run_name="__main__")


def lines(path: pathlib.Path) -> set[str]:
    return set(path.read_text().splitlines()) if path.exists() else set()


def add_line(path: pathlib.Path, line: str) -> None:
    with path.open("a") as file:
        print(line, file=file)


def start(example: str, folder: pathlib.Path, stage: str = "never") -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    given = f"{EXAMPLES[example]} --state_dir={{}}/unfinished --output_dir={{}}"
    called = [folder, stage, example, *given.replace("{}", str(folder)).split()]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "experiments.kills", "run", *map(str, called)],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def left_in(folder: pathlib.Path) -> dict[str, Any]:
    """All that a run left, by names of files, without what no two runs have in common."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.name == "weights":
            found[name] = lines(path)
        elif path.suffix == ".jsonl":
            found[name] = [
                {key: record[key] for key in record if not key.endswith(VOLATILE_KEYS)}
                for record in runs.read(path)
            ]
        elif path.suffix == ".keras":
            model = keras.saving.load_model(path)
            found[name] = [each.tobytes() for each in model.get_weights()]
        elif path.is_dir() or any(map(path.match, VOLATILE_FILES)):
            found[name] = None
        else:
            found[name] = path.read_bytes()
    found.pop("killed", None)
    return found


def finish(
    example: str, folder: pathlib.Path, whole: dict[str, Any], at_files: bool = False
) -> tuple[int, list[str]]:
    """Resumes a run until it ends, or kills it at each new file on the way.

    Returns how often it was killed, and in a list what is wrong in the end, if anything.
    """
    kills, status = 0, -signal.SIGKILL
    while status == -signal.SIGKILL:
        stage = ("before", "after")[kills % 2] if at_files else "never"
        status = start(example, folder, stage).wait()
        kills += status == -signal.SIGKILL
    if status:
        return kills, [f"status {status}: {(folder / 'log').read_text()[-1000:]}"]
    left = left_in(folder)
    names = sorted({*left, *whole})
    wrong = [n for n in names if left.get(n, "none") != whole.get(n, "none")]
    return kills, [f"other files: {', '.join(wrong)}"] if wrong else []


def kill(example: str, folder: pathlib.Path) -> dict[str, Any]:
    """Kills runs of an example at a moment each, and one more at each new file."""
    moments, began, kills = random.Random(0), time.monotonic(), 0
    if start(example, folder / "whole").wait():
        raise RuntimeError((folder / "whole" / "log").read_text()[-3000:])
    seconds, whole = time.monotonic() - began, left_in(folder / "whole")
    failures: list[str] = []
    while kills < FLAGS.kills:
        own = pathlib.Path(tempfile.mkdtemp(dir=folder))
        process = start(example, own)
        try:
            if process.wait(moments.uniform(0, seconds)):
                raise RuntimeError((own / "log").read_text()[-3000:])
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # With what it started.
            kills += 1
            process.wait()
        if left_in(own) != whole:  # A finished demo would begin anew.
            failures += finish(example, own, whole)[1]
    writes, wrong = finish(example, folder / "writes", whole, at_files=True)
    failures += wrong
    return {"kills": kills, "kills_in_writes": writes, "failures": failures}


def kill_exports(folder: pathlib.Path) -> dict[str, Any]:
    """Kills exports of version after version, and loads each as soon as it is there."""
    import tensorflow as tf

    moments, writes = random.Random(0), 0
    loaded: set[str] = set()
    failures: list[str] = []

    def load_new() -> None:
        found = {path.name for path in folder.iterdir() if path.name.isdigit()}
        for version in found - loaded:
            loaded.add(version)
            try:
                model = tf.saved_model.load(str(folder / version))
                model.serve(np.ones((2, 8), "float32"))
            except Exception as error:
                failures.append(f"version {version}: {error!r}")

    for _ in range(FLAGS.kills):
        first = str(1 + max(map(int, loaded), default=0))
        before = set(folder.glob(".scratch-*"))
        with subprocess.Popen(
            [sys.executable, "-c", EXPORTER, str(folder), first],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        ) as process:
            process.stdout.readline()
            end = time.monotonic() + moments.uniform(0, 3)
            while time.monotonic() < end:
                load_new()
                time.sleep(0.001)
            process.kill()
        scratch = set(folder.glob(".scratch-*"))
        writes += bool(scratch - before)
        load_new()
    if not loaded:
        failures.append("no version was written")
    counts = {"kills": FLAGS.kills, "kills_in_writes": writes}
    return {**counts, "versions_read": len(loaded), "failures": failures}


def tiny_images() -> FewShotData:
    """Six, three and three classes of 20 images, each with another brightness."""
    rng, parts = np.random.default_rng(0), []
    for first, count in ((0, 6), (6, 3), (9, 3)):
        labels = np.repeat(np.arange(first, first + count), 20)
        noise = rng.integers(0, 15, (len(labels), 16, 16, 1))
        images = 20 * labels[:, None, None, None] + noise
        parts.append(Split(images.astype("uint8"), labels))
    return FewShotData(*parts)


def section(results: pathlib.Path, names: Sequence[str]) -> str:
    found = {run["key"][0]: run for run in runs.read(results / "kills.jsonl")}
    columns = {"kills": "kills at random", "kills_in_writes": "kills at new files"}
    if "exports" in names:
        columns["versions_read"] = "versions read"
    rows = [[name, "not run"] for name in names]
    for row in rows:
        if (record := found.get(row[0])) is not None:
            row[1:] = [str(record[key]) for key in columns]
            row += [str(len(record["failures"])), tables.commands([record])]
    return tables.markdown(["what", *columns.values(), "failures", "command"], rows)


def main(_arguments: list[str]) -> None:
    path = runs.results_folder(FLAGS.output_dir) / "kills.jsonl"
    about = runs.about("kills")
    failed = False
    for example in FLAGS.example:
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch).resolve()
            if example == "exports":
                found = kill_exports(folder)
            else:
                save_file(tiny_images(), f"{folder}/images.npz")
                found = kill(example, folder)
        runs.RunRecords(path).add((example,), {**about, **found})
        print(f"{example}: {found}", flush=True)
        failed |= bool(found["failures"])
    sys.exit(int(failed))


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(pathlib.Path(sys.argv[2]), *sys.argv[3:])
        sys.exit()
    examples = [*EXAMPLES, "exports"]
    flags.DEFINE_multi_enum("example", examples, examples, "What is killed.")
    flags.DEFINE_integer("kills", 10, "Kills at random moments, each example.", 0)
    command.run(main)
