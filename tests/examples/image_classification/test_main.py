"""The command in small: runs, pictures, errors."""

import functools

import pytest
from absl.testing import flagsaver
from helpers import run_under_jax

import nsl_keras
from examples.common import runs
from examples.image_classification import __main__ as command
from examples.image_classification import methods, table


def folders(folder):
    return (
        f"--output_dir={folder}",
        f"--state_dir={folder}/unfinished",
        f"--model_dir={folder}/models",
    )


def run(folder, *arguments):
    """The example in this process, with flags as on the command line."""
    with flagsaver.flagsaver():
        command.FLAGS.unparse_flags()
        command.FLAGS(["test", *folders(folder), *arguments])
        command.main(["test"])


def results(folder, name):
    return runs.RunRecords(folder / "results" / "image_classification" / name)


def figures(folder):
    return sorted(path.name for path in (folder / "results" / "figures").iterdir())


@pytest.fixture
def narrow(monkeypatch):
    """A network of few filters."""
    convnet4 = functools.partial(nsl_keras.backbones.convnet4, filters=(4, 4, 4, 6))
    monkeypatch.setitem(methods.BACKBONES, "convnet4", convnet4)


SMALL = (
    *("--train_size=64", "--batch_size=16", "--steps=4", "--num_neighbors=30"),
    "--verbose=0",
)


@pytest.mark.long
def test_digits_end_to_end(tmp_path, capsys, narrow, one_thread):
    run(tmp_path, *SMALL, "--method=plain", "--method=neighborhoods_film")
    records = results(tmp_path, "convnet4_digits_64_4")
    setting = records.setting
    assert setting["recipe"]["rate_drops"] == [3]
    assert setting["dictionary"]["num_neighbors"] == 30
    assert setting["sgd"] == {"steps": 4, "rate_drops": [3, 3], "learning_rate": 0.1}
    neighborhoods, plain = records.runs
    assert plain["method"] == "plain"
    assert neighborhoods["method"] == "neighborhoods_film"
    for record in records.runs:
        assert 0 <= record["validation_accuracy"] <= 1
        assert 0 <= record["test_accuracy"] <= 1
        assert record["images_per_second"] > 0
        assert "examples.image_classification" in record["command"]
    assert 0 <= neighborhoods["test_unadapted_accuracy"] <= 1
    assert neighborhoods["inner_rate"] > 0
    # Keys and values of 30 entries and the inner rate; 3 * 10 numbers a channel.
    more = neighborhoods["parameters"] - plain["parameters"]
    assert more == 30 * (6 + 10) + 1 + 30 * (4 + 4 + 4 + 6) + 4
    assert "| vanilla + iFiLM | " in capsys.readouterr().out

    # What is finished is not run again; pictures come from the models kept.
    run(tmp_path, *SMALL, "--method=neighborhoods_film", "--figures")
    assert "MN + iFiLM, seed 0: finished before" in capsys.readouterr().out
    assert figures(tmp_path) == [
        f"convnet4_digits_neighborhoods_film_{name}.png"
        for name in ("adaptation", "entries", "feature_map", "prototype_cosines")
    ]

    # Rows of another experiment go into the same folder.
    run(tmp_path, *SMALL, "--experiment=A.6", "--method=plain_dot_sgd")
    assert table.experiments_of(records) == ["table_1", "A.6"]
    with pytest.raises(ValueError, match=r"another setting.*'temperature': 0.2"):
        run(tmp_path, *SMALL, "--temperature=0.5")
    with pytest.raises(ValueError, match="`figures` needs trained models"):
        run(
            tmp_path,
            *(*SMALL, "--method=plain", "--figures"),
            f"--model_dir={tmp_path}/none",
        )


@pytest.mark.long
def test_trials_choose_the_rate(tmp_path, capsys, one_thread):
    arguments = (
        *("--filters=4,4,4,6", "--input=standardized", "--cosine_decay", *SMALL),
        *("--method=neighborhoods", "--rates=1e-3,1e30", "--step_times"),
    )
    run(tmp_path, *arguments, "--tune", "--nohold_out")
    assert "| neighborhoods | 1e+30 | " in capsys.readouterr().out
    assert not (tmp_path / "models").exists()
    run(tmp_path, *arguments, "--tuned", "--nohold_out")
    records = results(tmp_path, "convnet4_4-4-4-6_digits_64_4_tuned")
    assert records.setting["filters"] == [4, 4, 4, 6]
    (record,) = records.runs
    assert record["learning_rate"] == 1e-3
    assert record["step_time"]["median"] > 0
    output = capsys.readouterr().out
    assert "convnet4 of 4-4-4-6 filters on digits" in output
    assert "which falls to 0 along a cosine" in output
    # Trials of a further row, beside runs that hold out no images.
    run(tmp_path, *arguments, "--tune", "--nohold_out", "--method=plain")
    assert "| plain | 0.001 | " in capsys.readouterr().out


@pytest.mark.long
def test_coarse_classes(tmp_path, capsys, narrow, one_thread):
    run(tmp_path, *SMALL, "--experiment=A.9", "--figures")
    records = results(tmp_path, "convnet4_digits_coarse_64_4")
    assert records.setting["classes"] == 2
    for record in records.runs:
        assert 0.1 < record["induction_accuracy"] <= 1
    assert figures(tmp_path) == [
        f"convnet4_digits_{name}_subcategories.png" for name in ("neighborhoods", "plain")
    ]
    assert "fine classes, by nearest images" in capsys.readouterr().out
    assert table.experiments_of(records) == ["A.9"]


@pytest.mark.long
def test_jax_from_a_file_without_tensorflow(tmp_path):
    file = f"{tmp_path}/digits.npz"
    run(tmp_path, "--train_size=64", f"--write_data_file={file}")
    run_under_jax(
        "examples.image_classification",
        *(f"--data_file={file}", *folders(tmp_path)),
        *("--steps=2", "--batch_size=8", "--num_neighbors=20", "--verbose=0"),
        "--method=neighborhoods",
    )
    (record,) = results(tmp_path, "convnet4_digits_all_2").runs
    assert record["versions"]["backend"].startswith("jax ")
    assert "test_unadapted_accuracy" in record
    for flag in ("data_file", "state_dir", "model_dir"):
        assert f"--{flag}={flag.upper()}" in record["command"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method=plain_extra",), "`method` must be one of 'plain', .* in table_1"),
        (("--steps=5", "--budget=0.1"), "`steps`, `budget` and `epochs` exclude"),
        (("--temperature=0", "--method=neighborhoods", *SMALL), "`temperature` must be"),
        (("--filters=4", "--backbone=resnet29", *SMALL), "`filters` must be left out"),
    ],
    ids=str,
)
def test_errors(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, *arguments)


def test_coarse_classes_of_an_unknown_set(tmp_path):
    file = f"{tmp_path}/other.npz"
    run(tmp_path, f"--write_data_file={file}")
    arguments = ("--experiment=A.9", "--dataset=other", f"--data_file={file}")
    with pytest.raises(ValueError, match=r"coarse classes for A.9.*dataset='other'"):
        run(tmp_path, *arguments)
