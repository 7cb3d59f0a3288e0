"""A campaign goes through its commands as far as the time allows, and goes on later."""

import json
import subprocess
import types

import pytest

from examples.campaign import __main__ as campaign
from examples.campaign import plans
from examples.common import stopping


@pytest.fixture
def calls(monkeypatch):
    """What is called, in place of calling it; `calls.codes` is what it returns."""
    found = types.SimpleNamespace(commands=[], codes={})

    def stand_in(arguments, timeout):
        found.commands.append(arguments[2:])
        code = found.codes.get(len(found.commands), 0)
        if code == "too long":
            raise subprocess.TimeoutExpired(arguments, timeout)
        return types.SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", stand_in)
    return found


def run(folder, *arguments):
    folders = (f"--output_dir={folder}", f"--state_dir={folder}/unfinished")
    return campaign.main([*folders, *arguments])


COMMANDS = list(plans.commands("narrow", ["0"]))


def test_all_commands_are_called_once(tmp_path, calls, capsys):
    arguments = ("--plan=narrow", "--seeds=0", "--data_file=images", "--also=--epochs=1")
    run(tmp_path, *arguments)
    assert len(calls.commands) == len(COMMANDS)
    first, second = calls.commands[:2]
    assert first[0] == "examples.neural_similarity"
    assert first[1 : len(COMMANDS[0])] == COMMANDS[0][1:]
    assert "--epochs=1" in first and "--data_file=images" in first
    assert f"--state_dir={tmp_path}/unfinished" in second
    assert any(argument.startswith("--stop_after_minutes=") for argument in first)
    models = [c for c in calls.commands if f"--model_dir={tmp_path}/unfinished/models" in c]
    assert {c[0] for c in models} == {"examples.image_classification"}
    assert f"{len(COMMANDS)} commands finished, 0 left" in capsys.readouterr().out
    path = tmp_path / "results" / "campaign" / "narrow.json"
    assert len(json.loads(path.read_text())) == len(COMMANDS)
    assert path.stat().st_size < 20_000
    run(tmp_path, *arguments)
    assert len(calls.commands) == len(COMMANDS)


def test_stopped_and_failed_commands_are_called_again(tmp_path, calls, capsys):
    calls.codes = {1: stopping.OutOfTime.CODE, 3: 1, 5: "too long"}
    assert run(tmp_path, "--seeds=0") == 1
    output = capsys.readouterr().out
    assert f"{len(COMMANDS) - 3} commands finished, 2 left" in output
    assert "Failed: neural_similarity" in output
    calls.codes = {}
    assert run(tmp_path, "--seeds=0") == 0
    again = [command[1 : len(COMMANDS[0])] for command in calls.commands[len(COMMANDS) :]]
    assert len(again) == 3
    assert again[0] == COMMANDS[0][1:]


def test_nothing_begins_after_the_time(tmp_path, calls, capsys):
    run(tmp_path, "--budget_minutes=0")
    assert not calls.commands
    assert "0 commands finished, 40 left" in capsys.readouterr().out
