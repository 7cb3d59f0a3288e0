"""Every command of a campaign is one that its example takes, and the rows train."""

import numpy as np
import pytest
from helpers import run_under_jax

from examples.campaign import plans
from examples.few_shot import methods as few_shot_methods
from examples.image_classification import methods as neighborhood_methods
from examples.neural_similarity import methods as similarity_methods
from examples.regression import data as regression_data

ROWS = plans.PLANS["cifar10"]


def flag(row, name):
    """The value of a row's flag, or `None`."""
    found = [each.removeprefix(f"--{name}=") for each in row.flags if f"--{name}=" in each]
    return found[0] if found else None


def rows_of(module):
    return [row for rows in plans.PLANS.values() for row in rows if row.module == module]


def known_methods(row):
    """The methods that the command of a row takes."""
    if row.module == "neural_similarity":
        return similarity_methods.TABLES[flag(row, "table")].methods
    if row.module == "image_classification":
        experiment = flag(row, "experiment") or "table_1"
        return neighborhood_methods.EXPERIMENTS[experiment].names
    return few_shot_methods.METHODS if row.module == "few_shot" else ()


def test_rows_are_rows_of_tables():
    for rows in plans.PLANS.values():
        assert len(set(rows)) == len(rows)
        for row in rows:
            assert set(row.methods) <= set(known_methods(row))


def test_all_published_rows_of_neural_similarity_have_a_command():
    found = {
        (flag(row, "table"), flag(row, "dataset"), method)
        for row in rows_of("neural_similarity")
        for method in row.methods
    }
    # What several tables have is in one folder of results.
    assert {similarity_methods.TABLES[number].network for number in "1234"} == {"cnn9"}
    made = {(dataset, method) for number, dataset, method in found if number in "1234"}
    for number, table in similarity_methods.TABLES.items():
        for method, errors in table.errors.items():
            for dataset in errors:
                either = (number, dataset, method) in found
                assert either or (number in "1234" and (dataset, method) in made)
    few_shot = {
        (flag(row, "backbone"), name) for row in rows_of("few_shot") for name in row.methods
    }
    for name, method in few_shot_methods.METHODS.items():
        assert {
            (backbone, name) for backbone in {**method.paper, **method.rebuttal}
        } <= few_shot


def test_all_published_rows_of_meta_neighborhoods_have_a_command():
    found = {
        ((flag(row, "backbone"), flag(row, "dataset")), method)
        for row in rows_of("image_classification")
        for method in row.methods
    }
    for experiment in neighborhood_methods.EXPERIMENTS.values():
        for place, accuracies in experiment.published.items():
            ours = set(accuracies) & set(neighborhood_methods.METHODS)
            assert {(place, method) for method in ours} <= found
    regression = [flag(row, "dataset") for row in rows_of("regression")]
    assert set(regression) == set(regression_data.UCI_FILES)


@pytest.mark.parametrize("plan", plans.PLANS)
def test_rows_of_a_table_have_the_same_trials(plan):
    tuning = {}
    for row in plans.PLANS[plan]:
        tuning.setdefault((row.module, row.flags), set()).add(row.tuning)
    assert all(len(each) == 1 for each in tuning.values())


def test_rows_without_seeds_have_one_command():
    rows = plans.PLANS["regression"]
    made = list(plans.commands("regression", ["0", "1"]))
    assert made == [["regression", *row.flags] for row in rows]


def test_order_of_commands():
    made = list(plans.commands("narrow", ["0", "1"]))
    rows = plans.PLANS["narrow"]
    assert len(made) == 3 * len(rows)
    assert len({tuple(command) for command in made}) == len(made)
    methods = [
        next(flag for flag in command if flag.startswith("--method="))[9:]
        for command in made
    ]
    assert methods[:10:2] == [
        *("cnn", "dynamic_dns"),
        *("plain", "neighborhoods_film", "neighborhoods"),
    ]
    for trials, run in zip(made[:20:2], made[1:20:2], strict=True):
        assert "--tune" in trials
        assert {"--tuned", "--seeds=0"} <= set(run)
    assert all({"--tuned", "--seeds=1"} <= set(run) for run in made[20:])


SCRIPT = """
import importlib, pathlib, sys
from absl import flags
from examples.campaign import plans
folder, data_file, module, flag, method = sys.argv[1:]
command = importlib.import_module(f"examples.{module}.__main__")
small = [
    "--steps=2", "--batch_size=4", "--save_every=1", "--on_device", "--verbose=0",
    "--warmup_steps=1", f"--data_file={data_file}", f"--state_dir={folder}/unfinished",
]
for place, row in enumerate(plans.PLANS["cifar10"]):
    if (row.module, row.methods) != (module, (method,)) or flag not in row.flags:
        continue
    narrow = {
        "neural_similarity": ["--filters=4,4,6"],
        "image_classification": ["--num_neighbors=8", f"--model_dir={folder}/models"],
    }[module]
    flags.FLAGS.unparse_flags()
    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()  # Back to its default.
    own = [f"--output_dir={folder}/{place}", f"--method={method}"]
    flags.FLAGS(["test", *row.flags, *own, *small, *narrow])
    command.main(["test"])
"""


@pytest.fixture
def images(tmp_path):
    """A file of a few images like CIFAR-10's."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part in ("train", "validation", "test"):
        # As many in each as in a batch: whatever is compiled is compiled once.
        arrays[f"{part}_images"] = rng.integers(0, 256, (4, 32, 32, 3)).astype("uint8")
        arrays[f"{part}_labels"] = np.array([0, 3, 6, 9])
    np.savez(tmp_path / "images.npz", class_names=list("abcdefghij"), **arrays)
    return tmp_path / "images.npz"


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "flag", "method"),
    [
        ("neural_similarity", "--table=4", "dynamic_dns"),
        ("image_classification", "--backbone=resnet29", "neighborhoods_film"),
    ],
)
def test_published_rows_train_under_jax(module, flag, method, images, tmp_path):
    script = tmp_path / "rows.py"
    script.write_text(SCRIPT)
    run_under_jax(script, str(tmp_path), str(images), module, flag, method)
    wanted = [
        row
        for row in ROWS
        if (row.module, row.methods) == (module, (method,)) and flag in row.flags
    ]
    made = tmp_path.glob(f"*/results/{module}/*/*_0.json")
    assert len(list(made)) == len(wanted) > 0
