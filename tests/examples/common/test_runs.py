"""Records of finished runs: a file each, none made twice, no settings mixed."""

import json
import os
import sys

import pytest

from examples.common import runs

SETTING = {"dataset": "digits", "sizes": (1, 2)}


def test_a_file_a_run(tmp_path, capsys):
    made = []

    def run(method, seed):
        made.append((method, seed))
        return {"method": method, "seed": seed, "figures": [1, 2, 3]}

    records = runs.RunRecords(tmp_path / "digits", SETTING)
    assert records.runs == []
    titles = runs.every({"b": "B", "a / c": "A or C"}, ["0", "10", "2"])
    runs.run_all(records, titles, run)
    assert made == [(m, s) for s in (0, 10, 2) for m in ("b", "a / c")]
    names = ["a_c_0", "a_c_2", "a_c_10", "b_0", "b_2", "b_10"]
    assert [f"{each['method'][0]}{each['seed']}" for each in records.runs] == [
        *("a0", "a2", "a10", "b0", "b2", "b10")
    ]
    files = {path.stem for path in (tmp_path / "digits").iterdir()}
    assert files == {*names, "setting"}
    # Lists of numbers stand on one line.
    assert "[1, 2, 3]" in (tmp_path / "digits" / "b_0.json").read_text()

    again = runs.RunRecords(tmp_path / "digits", SETTING)
    runs.run_all(again, titles, run)
    assert len(made) == 6
    assert capsys.readouterr().out.count("finished before") == 6
    assert [each.setting for each in runs.all_of(tmp_path)] == [
        {"dataset": "digits", "sizes": [1, 2]}
    ]


def test_another_setting(tmp_path):
    runs.RunRecords(tmp_path, SETTING).add(("a", 0), {"seed": 0})
    other = {**SETTING, "dataset": "mnist"}
    with pytest.raises(ValueError, match=r"another setting.*\('digits', 'mnist'\)"):
        runs.RunRecords(tmp_path, other)
    records = runs.RunRecords(tmp_path, other, replace=True)
    assert records.runs == []
    assert records.setting["dataset"] == "mnist"


@pytest.mark.parametrize(
    "content",
    [{}, [], {"a": [{"b": None}, {}], "c": {"d": [1, [2]]}}, {"e": "[x]"}],
    ids=str,
)
def test_json_reads_as_it_was(content):
    assert json.loads(runs.as_json(content)) == content


def test_a_damaged_record_is_named(tmp_path):
    records = runs.RunRecords(tmp_path, SETTING)
    records.add(("a", 0), {"seed": 0})
    (tmp_path / "a_0.json").write_text("")
    with pytest.raises(ValueError, match=r"a_0.json must be whole. Delete it"):
        records.runs  # noqa: B018


def test_states_go_with_the_record(tmp_path, capsys):
    records = runs.RunRecords(tmp_path / "made", SETTING, states=tmp_path / "all" / "own")

    def run(method):
        state = records.state((method,))
        state.mkdir(parents=True)
        assert (tmp_path / "made" / "setting.json").exists()
        return {"method": method}

    runs.run_all(records, {("a",): "A", ("b",): "B"}, run)
    assert os.listdir(tmp_path / "all") == []
    # A kill may come between the record and the end of the state.
    records.state(("a",)).mkdir(parents=True)
    (tmp_path / "all" / "other").mkdir()
    runs.run_all(records, {("a",): "A"}, run)
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["other"]
    with pytest.raises(ValueError, match="`states` must be given"):
        runs.RunRecords(tmp_path / "made", SETTING).state(("a",))


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    records = runs.RunRecords(tmp_path / "file" / "made", SETTING)
    with pytest.raises(OSError, match="must be a folder that can be written to"):
        runs.run_all(records, {("a",): "A"}, lambda method: pytest.fail("It ran."))


def test_commands_name_no_folders(monkeypatch):
    flags = ["--data_dir=somewhere", "--state_dir", "there", "--seeds=1"]
    monkeypatch.setattr(sys, "argv", ["x", *flags])
    expected = "python -m examples.demo --data_dir=DATA_DIR --state_dir=STATE_DIR --seeds=1"
    assert runs.command("demo") == expected
    flags = ["--stop_after_minutes=3", "--predictors=width 4,plain", "--noaugmentation"]
    monkeypatch.setattr(sys, "argv", ["x", *flags])
    expected = "python -m examples.demo '--predictors=width 4,plain' --noaugmentation"
    assert runs.command("demo") == expected
