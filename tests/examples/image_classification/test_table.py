"""Tables of runs beside the published figures."""

import dataclasses

from examples.common import runs
from examples.image_classification import methods, table

SETTING = {
    "backbone": "resnet29",
    "coarse": False,
    "dataset": "cifar10",
    "train_examples": 45_000,
    "test_examples": 10_000,
    "classes": 10,
    "dictionary": {"num_neighbors": 5000, "temperature": 0.2, "dropout": 0.5},
    "recipe": dataclasses.asdict(methods.published("cifar10")),
}


def record(method, seed, accuracy, **others):
    return {
        "method": method,
        "seed": seed,
        "command": "python -m examples.image_classification",
        "parameters": 1234,
        "images_per_second": 100.0,
        "devices": ["gpu:0"],
        "test_accuracy": accuracy,
        **others,
    }


def test_table_of_runs(tmp_path):
    records = runs.RunRecords(tmp_path / "resnet29", SETTING)

    def add(run):
        records.add((run["method"], run["seed"]), run)

    for seed, accuracy in ((0, 0.92), (1, 0.90)):
        add(record("plain", seed, accuracy))
        more = {"test_unadapted_accuracy": accuracy - 0.1}
        add(record("neighborhoods", seed, accuracy + 0.01 + 0.01 * seed, **more))
    diverged = record("plain_film", 0, None, diverged="The training loss is nan.")
    del diverged["test_accuracy"], diverged["images_per_second"]
    add(diverged)
    text = table.section(records)
    assert "### resnet29 on cifar10, 10 classes: 45,000 images, 160,000 steps" in text
    assert "| vanilla | 95.06 | 91.00 ± 1.41 |  |  | 0, 1 | 1,234 | 100 |" in text
    row = "| MN | 95.56 | 92.50 ± 0.71 | +1.50 ± 0.71 | 81.00 ± 1.41 | 0, 1 | 1,234 | 100 |"
    assert row in text
    assert "| vanilla + iFiLM | 95.17 | diverged in 1 of 1 |" in text
    assert "| MN + iFiLM | 95.58 | not run |  |  |  |  |  |" in text
    assert "Appendix" not in text

    rest = table.not_run([records])
    assert "| resnet29 | cifar10 | 95.06 | 95.31" not in rest
    assert "| resnet29 | cifar100 | 76.51 | 77.94" in rest
    assert "| resnet56 | imagenet | 48.41 | 48.83 | 52.03 | 51.85 | 54.23 | not run" in rest
    assert "Table 3 (Appendices A.5 and A.6)" in rest
    assert "Appendix A.3, Figure 7. As many parameters in an extra layer: not run." in rest
