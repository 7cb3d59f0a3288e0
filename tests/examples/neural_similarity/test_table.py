"""Tables of runs beside the published figures, which stand by their data set alone."""

import dataclasses

from examples.common import runs, tables
from examples.neural_similarity import methods, table


def record(method, seed, accuracy, **others):
    return {
        "method": method,
        "seed": seed,
        "command": "python -m examples.neural_similarity",
        "parameters": 1234,
        "images_per_second": 100.0,
        "devices": ["gpu:0"],
        "test_accuracy": accuracy,
        **others,
    }


SETTING = {
    "network": "cnn9",
    "variant": "code",
    "batch_normalization_momentum": 0.999,
    "dataset": "cifar10",
    "train_examples": 45_000,
    "test_examples": 10_000,
    "recipe": dataclasses.asdict(methods.RECIPES["paper"]),
}


def records_of(folder, made, **changes):
    records = runs.RunRecords(folder, {**SETTING, **changes})
    for each in made:
        records.add((each["method"], each["seed"]), each)
    return records


def test_table_of_runs(tmp_path):
    made = []
    for seed, accuracy in ((0, 0.92), (1, 0.90)):
        made.append(record("cnn", seed, accuracy))
        made.append(record("static_dns", seed, accuracy + 0.01 + 0.01 * seed))
    diverged = record("dynamic_dns_cnn", 0, None, diverged="The training loss is nan.")
    del diverged["test_accuracy"], diverged["images_per_second"]
    text = table.section(records_of(tmp_path / "cifar10", [*made, diverged]))
    assert "### cnn9 (code variant) on cifar10: 45,000 images, 64,000 steps" in text
    assert "| CNN | 7.78 | 9.00 ± 1.41 |  | 0, 1 | 1,234 | 100 |" in text
    row = "| static NSN, DNS | 7.15 | 7.50 ± 0.71 | -1.50 ± 0.71 | 0, 1 | 1,234 | 100 |"
    assert row in text
    assert "| CNN++ | 7.29 | not run |  |  |  |  |" in text
    assert "plain convolutions | 7.04 | diverged in 1 of 1 |" in text
    assert "Table 3." not in text
    # Beside other data there are no published figures.
    text = table.section(records_of(tmp_path / "digits", made, dataset="digits"))
    assert "| static NSN, DNS | 7.50 ± 0.71 | -1.50" in text
    assert "paper" not in text


def test_speeds_are_of_accelerators():
    slow = record("cnn", 0, 0.9, devices=["cpu:0"], images_per_second=3.0)
    assert tables.images_per_second([slow]) == ""
    assert tables.images_per_second([slow, record("cnn", 1, 0.9)]) == "100"


def test_top_5_errors_of_imagenet(tmp_path):
    made = [record("dynamic_dns", 0, 0.6, test_top_5=0.8)]
    changes = {"network": "cnn10", "dataset": "imagenet2012", "variant": None}
    text = table.section(records_of(tmp_path, made, **changes))
    assert "| dynamic NSN, DNS | 40.61 | 40.00 |  | 0 | 18.04 | 20.00 | 1,234 |" in text


def test_tables_of_which_nothing_was_run():
    text = table.not_run(["4", "8"])
    assert "| method | cifar10 | cifar100 | here |" in text
    assert "| CNN++ | 7.29 | 28.70 | not run |" in text
    assert "| SphereNet, self-attention | 8.24 | not run |" in text
