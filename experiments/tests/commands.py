"""Runs experiments as commands, in this process."""

import contextlib
import io
import runpy
import sys
from unittest import mock

import numpy as np
from absl import flags

from experiments.common import runs
from experiments.common.data import Split, save_file
from experiments.few_shot.data import FewShotData

PACKAGES = ("examples", "experiments")


def run(module, *arguments):
    """Runs a module with flags; returns its exit code or message, and what it printed.

    Commands define flags of the same names, so each run imports them anew.
    """
    for name in list(sys.modules):
        if name.partition(".")[0] in PACKAGES and ".tests" not in name:
            del sys.modules[name]
    for name in list(flags.FLAGS):
        if flags.FLAGS.find_module_defining_flag(name, "").startswith(PACKAGES):
            delattr(flags.FLAGS, name)
    code = None
    with (
        mock.patch.object(sys, "argv", [module, *map(str, arguments)]),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        finally:
            flags.FLAGS.unparse_flags()  # Tests beside this one are no commands.
    return code, printed.getvalue()


def run_well(module, *arguments):
    """Runs a module that must succeed; returns what it printed."""
    code, printed = run(module, *arguments)
    assert not code, code
    return printed


def folders(folder, models=False):
    """The flags that keep all that a command writes below a folder."""
    given = (f"--output_dir={folder}", f"--state_dir={folder}/unfinished")
    return (*given, f"--model_dir={folder}/models") if models else given


def records(folder, experiment="*"):
    """The records that commands wrote below a folder."""
    paths = sorted(folder.glob(f"results/{experiment}.jsonl"))
    return [record for path in paths for record in runs.read(path)]


def tiny_images():
    """Six, three and three classes of 20 images, each with another brightness."""
    rng, parts = np.random.default_rng(0), []
    for first, count in ((0, 6), (6, 3), (9, 3)):
        labels = np.repeat(np.arange(first, first + count), 20)
        noise = rng.integers(0, 15, (len(labels), 16, 16, 1))
        images = 20 * labels[:, None, None, None] + noise
        parts.append(Split(images.astype("uint8"), labels))
    return FewShotData(*parts)


def few_shot_file(folder):
    path = folder / "few_shot.npz"
    save_file(tiny_images(), path)
    return path
