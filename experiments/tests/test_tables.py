"""Records of runs, and the tables that are made from them."""

import dataclasses

import pytest

from experiments import tables
from experiments.common import runs, tables as tables_of_runs
from experiments.neural_similarity import (
    methods as similarity_methods,
    table as similarity_table,
)

SETTING = {"dataset": "digits", "sizes": (1, 2)}


def test_each_run_has_a_line_and_is_made_once(tmp_path, capsys):
    path, made = tmp_path / "demo.jsonl", []

    def run(method, seed):
        made.append((method, seed))
        return {"method": method, "seed": seed, "figures": [1, 2, 3]}

    titles = runs.every({"b": "B", "a / c": "A or C"}, ["0", "10", "2"])
    runs.run_all(runs.RunRecords(path, "digits", SETTING), titles, run)
    runs.RunRecords(path, "mnist", {}).add(("b", 0), {"seed": 0})
    whole = path.read_text()
    assert len(whole.splitlines()) == len(made) + 1 == 7
    records = runs.RunRecords(path, "digits", SETTING)
    runs.run_all(records, titles, run)
    assert path.read_text() == whole
    assert capsys.readouterr().out.count("finished before") == 6
    assert [(run["method"], run["seed"]) for run in records.runs] == made
    assert {run["commit"] for run in records.runs} == {runs.commit()}
    assert [each.name for each in runs.all_of(path)] == ["digits", "mnist"]
    # A newer record takes the place of an older one; a setting is one thing.
    records.add(("b", 10), {"method": "b", "seed": 11})
    assert [run["seed"] for run in records.runs if run["key"] == ["b", 10]] == [11]
    with pytest.raises(ValueError, match=r"another setting.*'digits', 'mnist'"):
        runs.RunRecords(path, "digits", {**SETTING, "dataset": "mnist"})
    runs.clear(path, "digits")
    assert [run["name"] for run in runs.read(path)] == ["mnist"]


def test_a_line_that_a_kill_cut_off_does_not_count(tmp_path):
    path = tmp_path / "demo.jsonl"
    records = runs.RunRecords(path)
    for seed in range(2):
        records.add((seed,), {"seed": seed})
    path.write_text(path.read_text()[:-5])
    assert [run["seed"] for run in records.runs] == [0] and not records.holds((1,))
    records.add((1,), {"seed": 1})
    assert [run["seed"] for run in records.runs] == [0, 1]
    path.write_text("{\n" + path.read_text())
    with pytest.raises(ValueError, match=r"demo.jsonl must have whole lines. Delete"):
        records.holds((1,))


def test_states_go_with_the_record(tmp_path):
    states = tmp_path / "all" / "own"
    records = runs.RunRecords(tmp_path / "made.jsonl", states=states)

    def run(method):
        records.state((method,)).mkdir(parents=True)
        return {"method": method}

    runs.run_all(records, {("a",): "A", ("b",): "B"}, run)
    assert not list((tmp_path / "all").iterdir())
    # A kill may come between the record and the end of the state.
    records.state(("a",)).mkdir(parents=True)
    (tmp_path / "all" / "other").mkdir()
    runs.run_all(records, {("a",): "A"}, run)
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["other"]


# Tables of made-up runs beside the published figures.


def record(method, seed, accuracy, **others):
    made = {
        "method": method,
        "seed": seed,
        "command": "python -m examples.x",
        "parameters": 1234,
        "versions": {"backend": "jax 0.11"},
        "test_accuracy": accuracy,
        **others,
    }
    if "diverged" in made:
        del made["test_accuracy"]
    return made


def records_of(folder, setting, made):
    records = runs.RunRecords(folder / "made.jsonl", "x", setting)
    for each in made:
        records.add((each["method"], each["seed"]), each)
    return records


NEURAL_SIMILARITY = {
    "network": "cnn9",
    "variant": "code",
    "batch_normalization_momentum": 0.999,
    "dataset": "cifar10",
    "train_examples": 45_000,
    "test_examples": 10_000,
    "recipe": dataclasses.asdict(similarity_methods.RECIPES["paper"]),
}


def test_table_of_neural_similarity(tmp_path):
    made = [record("dynamic_dns_cnn", 0, None, diverged="The loss is nan.")]
    for seed, accuracy in ((0, 0.92), (1, 0.90)):
        made.append(record("cnn", seed, accuracy))
        made.append(record("static_dns", seed, accuracy + 0.01 + 0.01 * seed))
    text = similarity_table.section(records_of(tmp_path / "1", NEURAL_SIMILARITY, made))
    for row in (
        "| CNN | 7.78 | 8.00 and 10.00 |  | 0, 1 | 1,234 |",
        "| static NSN, DNS | 7.15 | 7.00 and 8.00 | -1.00 and -2.00 | 0, 1 | 1,234 |",
        "| CNN++ | 7.29 | not run |  |  |  |",
        "plain convolutions | 7.04 | diverged in 1 of 1 |",
    ):
        assert row in text
    # Beside other data there are no published figures.
    digits = {**NEURAL_SIMILARITY, "dataset": "digits"}
    text = similarity_table.section(records_of(tmp_path / "2", digits, made))
    assert "| static NSN, DNS | 7.00 and 8.00 | -1.00" in text and "paper" not in text


def test_trials_of_two_rates_stand_in_one_row(tmp_path):
    setting = {**NEURAL_SIMILARITY, "tuned": True, "validation_examples": 5000}
    path = tmp_path / "neural_similarity_tuning.jsonl"
    records = runs.RunRecords(path, "x", setting)
    for method, share in (("cnn", 0.5), ("dynamic_uns_slow", 0.25)):
        for rate in (0.01, 0.003):
            found = {"validation_accuracy": share + 10 * rate, "training_loss": share}
            made = record(method, 0, 0.0, learning_rate=rate, **found)
            records.add((method, rate, 0), made)
    text = similarity_table.apart(tmp_path, "x", (0.01, 0.003))
    assert "Errors on 5,000 validation images" in text and "momentum at 0.01, " in text
    assert "| CNN | 40.00 |  | 0.50 | 47.00 | 0 | 0.01 |" in text
    slow = "a tenth of the rate in predictors | 65.00 | +25.00 | 0.25 | 72.00 | 0 | 0.01 |"
    assert slow in text
    # Of tables that are not the paper's, the one with all runs is shown.
    setting = {**NEURAL_SIMILARITY, "predictors": "default"}
    for name, other in (("dynamic_uns_slow", "uns"), ("eca", "cost")):
        made = [record(each, 0, 0.5) for each in ("cnn", "dynamic_uns_blocks", name)]
        found = records_of(tmp_path / name, setting, made)
        assert similarity_table.tables_of(found) == [other]


def test_rows_that_were_not_trained_alike_are_not_paired(tmp_path):
    def row(method, rate, **others):
        return [record(method, 0, 0.5, learning_rate=rate, **others)]

    def trial(method, rate, accuracy, steps=10):
        return {"method": method, "rate": rate, "accuracy": accuracy, "steps": steps}

    plain = row("cnn", 0.01)
    trials = [trial("cnn", rate, rate) for rate in (0.001, 0.01)]
    trials += [trial("dns", rate, 0.5 - rate) for rate in (0.001, 0.01)]
    assert not tables_of_runs.incomparable(plain, row("dns", 0.001), trials)
    # A rate that was tried for one row alone is no difference unless it was chosen.
    trials += [trial("dns", 0.0001, 0.0)]
    assert not tables_of_runs.incomparable(plain, row("dns", 0.001), trials)
    assert "best" in tables_of_runs.incomparable(plain, row("dns", 0.0001), trials)
    assert "best" in tables_of_runs.incomparable(plain, row("eca", 0.001), trials)
    longer = [*trials, trial("dns", 0.1, 0.0, steps=20)]
    assert "steps" in tables_of_runs.incomparable(plain, row("dns", 0.001), longer)
    reason = tables_of_runs.incomparable(plain, row("dns", 0.001), trials, chance=0.1)
    assert reason == "the trials of cnn did not leave chance"
    other = row("dns", 0.001, versions={"backend": "tensorflow 2.21"})
    assert tables_of_runs.incomparable(plain, other) == "jax and tensorflow"
    with pytest.raises(
        ValueError, match=r"\['cnn'\] and \['dns'\] are not comparable: jax"
    ):
        tables_of_runs.require_comparable(plain, other)
    # In a table the figure stays, the difference does not.
    setting = {**NEURAL_SIMILARITY, "tuned": True}
    other[0]["method"] = "static_dns"
    text = similarity_table.section(records_of(tmp_path, setting, [*plain, *other]))
    assert "| static NSN, DNS | 7.15 | 50.00 | not comparable | 0 |" in text


# What the check asks of a table.


def test_a_row_needs_its_control_and_a_rate_at_the_edge_its_star(tmp_path):
    made = [record(name, 0, 0.5, learning_rate=0.01) for name in ("cnn", "dynamic_dns")]
    records = records_of(tmp_path, {**NEURAL_SIMILARITY, "tuned": True}, made)
    trials = [
        {"method": run["method"], "rate": rate, "accuracy": rate}
        for run in made
        for rate in (0.001, 0.01)
    ]
    fair = similarity_table.FAIR
    titles = [similarity_methods.METHODS[name].title for name in fair.beside["dynamic_dns"]]
    text = similarity_table.section(records, ["cost"])
    (lacking,) = fair.problems(text, made)
    assert lacking == f"dynamic NSN, DNS without {titles[1]}"
    # Of three rates the middle one needs no star.
    middle = [*trials, {"method": "dynamic_dns", "rate": 0.1, "accuracy": 0.0}]
    (star, _) = fair.problems(text, made, middle)
    assert star == "CNN without the star of its learning rate"
    rows = [[f"{each}{tables_of_runs.star(made[:1], trials)}", "1"] for each in titles]
    table = tables_of_runs.markdown(["method", "error"], [*rows, ["dynamic NSN, DNS*"]])
    assert "| CNN* | 1 |" in table and table.endswith(
        "the learning rate is the lowest or the highest that was tried."
    )
    assert not fair.problems(table, made, trials)
    # Settings name the rates, of all methods or of each.
    for tried in ([0.1, 0.3], {"head": [0.1, 0.3]}):
        run = {"method": "head", "rate": 0.3, "setting": {"rates": tried}}
        assert tables_of_runs.star([run]) == "*"


def test_each_deviation_is_over_seeds_of_the_records():
    values = [1.5, 2.5, 4.25]
    shown = tables_of_runs.mean(values, "+"), tables_of_runs.mean(values[:2], "+")
    assert shown == ("+2.75 ± 1.39", "+1.50 and +2.50")
    table = tables_of_runs.markdown(["gain"], [[shown[0]]])
    assert table.endswith("\n\n± over 3 seeds.")
    assert not tables_of_runs.unstated(f"{table} In prose: 2.75 ± 1.39.")
    other = tables_of_runs.mean([1000.0, 2000.0, 3000.0], over="episodes")
    assert tables_of_runs.unstated(f"{other}; 2.75 ± 1.38") == [other, "2.75 ± 1.38"]


# The figures of README, docs/ and results/.


def test_check_names_a_stale_page(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("old")
    monkeypatch.setattr(tables, "made", lambda: {page: "new"})
    monkeypatch.setattr(tables, "LACKING", {})
    with pytest.raises(SystemExit, match=r"experiments.tables for page.md"):
        tables.main(["--check"])
    assert page.read_text() == "old"
    tables.main([])
    assert page.read_text() == "new"
    with pytest.raises(SystemExit) as ended:
        tables.main(["--check"])
    assert not ended.value.code
    tables.LACKING["a row without its control"] = None
    monkeypatch.setattr(tables, "made", lambda: {page: "1.25 ± 0.11"})
    page.write_text("1.25 ± 0.11")
    with pytest.raises(SystemExit, match=r"page.md: 1.25 ± 0.11\na row without"):
        tables.main(["--check"])


def test_results_are_few_and_small():
    found = [path for path in tables.RESULTS.rglob("*") if path.is_file()]
    assert len(found) <= 45
    assert all(path.stat().st_size < 2**18 for path in found if path.suffix == ".png")


def test_commands_name_no_folder_of_a_machine(monkeypatch):
    given = ["x", "--data_dir=/a", "--output_dir", "/b", "--state_dir", "/c", "--seeds=0"]
    monkeypatch.setattr("sys.argv", given)
    found = "--data_dir=DATA_DIR --output_dir=. --state_dir=STATE_DIR --seeds=0"
    assert runs.command("demo") == f"python -m experiments.demo {found}"
    for path in tables.RESULTS.glob("*.jsonl"):
        assert "=/" not in path.read_text(), path.name


def test_pages_are_made_from_the_records_and_compare_fairly():
    with pytest.raises(SystemExit) as ended:
        tables.main(["--check"])
    assert not ended.value.code, ended.value.code
