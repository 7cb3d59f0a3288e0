"""Runs experiments as commands, in this process."""

import contextlib
import io
import json
import runpy
import sys
from unittest import mock

from absl import flags

from experiments.few_shot import data as few_shot_data
from experiments.kills import tiny_images

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
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def few_shot_file(folder):
    """Images for few-shot learning, in a file."""
    path = folder / "few_shot.npz"
    few_shot_data.save(tiny_images(), path)
    return path


def no_harm_run(method, seed, accuracy, gap=0.0, seconds=1.0, **changes):
    """A record of the do-no-harm matrix, made up."""
    last = {"training": 0.9, "inference": 0.9}
    first = {"training": 0.9, "inference": 0.9 - gap}
    return {
        "dataset": "digits",
        "network": "narrow_cnn",
        "method": method,
        "seed": seed,
        "parameters": 1000,
        "test_accuracy": [0.1, accuracy],
        "by_mode": {"first_epoch": first, "last_epoch": last},
        "seconds_per_step": seconds,
        "command": "python -m experiments.no_harm",
        **changes,
    }


def no_harm_runs(**accuracies):
    """Records of one seed for each accuracy, by method."""
    return [
        no_harm_run(method, seed, accuracy)
        for method, of_seeds in accuracies.items()
        for seed, accuracy in enumerate(of_seeds)
    ]
