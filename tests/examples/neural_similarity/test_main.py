"""The command in small: runs, tables, errors."""

import keras
import numpy as np
import pytest
from absl.testing import flagsaver
from helpers import run_under_jax

from examples.common import runs
from examples.neural_similarity import __main__ as command
from examples.neural_similarity import table


def run(folder, *arguments):
    """The example in this process, with flags as on the command line."""
    with flagsaver.flagsaver():
        command.FLAGS.unparse_flags()
        folders = (f"--output_dir={folder}", f"--state_dir={folder}/unfinished")
        command.FLAGS(["test", *folders, *arguments])
        command.main(["test"])


SMALL = (
    *("--train_size=32", "--batch_size=16", "--steps=2", "--verbose=0"),
    "--nojit_compile",
)


def results(folder, name):
    return runs.RunRecords(folder / "results" / "neural_similarity" / name)


@pytest.mark.long
def test_digits_end_to_end(tmp_path, capsys):
    run(tmp_path, *SMALL, "--method=cnn", "--method=static_dns")
    records = results(tmp_path, "cnn9_digits_32_2")
    assert records.setting["train_examples"] == 32
    assert records.setting["recipe"]["rate_drops"] == [1, 2]
    assert records.setting["batch_normalization_momentum"] == 0.9
    plain, static = records.runs
    assert (plain["method"], static["method"]) == ("cnn", "static_dns")
    for record in records.runs:
        assert record["seed"] == 0
        assert 0 <= record["validation_accuracy"] <= 1
        assert 0 <= record["test_accuracy"] <= record["test_top_5"] <= 1
        assert record["images_per_second"] > 0
        assert "examples.neural_similarity" in record["command"]
        assert keras.__version__ == record["versions"]["keras"]
    assert static["parameters"] == plain["parameters"] + 9 * 9
    output = capsys.readouterr().out
    assert "| static NSN, DNS | " in output
    assert "| dynamic NSN, DNS | not run |" in output

    # What is finished is not run again, for another table of the same setting neither.
    run(tmp_path, *SMALL, "--table=3", "--method=cnn", "--method=dynamic_dns")
    assert "CNN, seed 0: finished before" in capsys.readouterr().out
    assert [record["method"] for record in records.runs] == [
        *("cnn", "dynamic_dns", "static_dns")
    ]
    assert table.tables_of(records) == ["1", "2", "3", "4"]
    assert "Table 3. Shared" in table.section(records, ["3"])
    assert not list((tmp_path / "unfinished").glob("*/*"))

    with pytest.raises(ValueError, match=r"runs of another setting.*'learning_rate': 0.1"):
        run(tmp_path, *SMALL, "--method=cnn", "--learning_rate=0.5")


@pytest.mark.long
def test_trials_choose_the_rate(tmp_path, capsys):
    arguments = (
        *("--table=cost", "--filters=4,4,8", "--train_size=32", "--batch_size=8"),
        *("--epochs=1", "--optimizer=adam", "--cosine_decay", "--input=standardized"),
        *("--verbose=0", "--nojit_compile", "--method=cnn", "--method=static_dns"),
        *("--step_times", "--rates=1e-3,1e30", "--nohold_out"),
    )
    with pytest.raises(ValueError, match="needs the same trials of every row"):
        run(tmp_path, *arguments, "--tuned")
    run(tmp_path, *arguments, "--tune", "--tuning_share=0.5", "--method=cnn")
    assert "| cnn | 1e+30 | " in capsys.readouterr().out
    # An epoch of the runs, which train on 257 validation images too.
    name = "cnn9_default_4-4-8_digits_32_36_tuned"
    trials = runs.RunRecords(tmp_path / "results" / "neural_similarity_tuning" / name)
    assert len(trials.runs) == 4
    assert not any("test_accuracy" in trial for trial in trials.runs)
    with pytest.raises(ValueError, match=r"another setting.*'tuning_share': \(0.5, 0.25\)"):
        run(tmp_path, *arguments, "--tune", "--tuning_share=0.25", "--method=cnn")
    with pytest.raises(ValueError, match=r"of the same setting.*'optimizer': 'adam'"):
        run(tmp_path, *arguments, "--optimizer=adamw", "--tuned")
    run(tmp_path, *arguments, "--tuned")
    records = results(tmp_path, name)
    assert records.setting["predictors"] == "default"
    assert records.setting["filters"] == [4, 4, 8]
    assert records.setting["input"] == "standardized"
    for record in records.runs:
        assert record["learning_rate"] == 1e-3
        assert record["multiply_adds"] > 0
        time = record["step_time"]
        assert 0 < time["low"] <= time["median"] <= time["high"]
    output = capsys.readouterr().out
    assert "of 4-4-8 filters on digits" in output
    assert "| CNN with the multiply-adds of dynamic DNS | not run |" in output
    assert "step time / plain (quartiles)" in output
    assert table.tables_of(records) == ["cost"]


@pytest.mark.long
def test_jax_from_a_file_without_tensorflow(tmp_path, capsys):
    file = f"{tmp_path}/digits.npz"
    run(tmp_path, "--train_size=64", f"--write_data_file={file}")
    assert f"Wrote {file}" in capsys.readouterr().out
    run_under_jax(
        "examples.neural_similarity",
        *(f"--data_file={file}", f"--output_dir={tmp_path}"),
        f"--state_dir={tmp_path}/unfinished",
        *("--steps=2", "--batch_size=8", "--method=cnn", "--verbose=0"),
    )
    (record,) = results(tmp_path, "cnn9_digits_all_2").runs
    assert record["versions"]["backend"].startswith("jax ")
    assert "--data_file=DATA_FILE" in record["command"]


class Streamed:
    """A stream's stand-in: classes by brightness."""

    class_names = ("dark", "bright")
    image_shape = (16, 16, 3)
    fingerprint = None
    counts = {"train_examples": 24, "validation_examples": 0, "test_examples": 7}  # noqa: RUF012

    def training_batches(self, batch_size, seed):
        labels = np.arange(batch_size) % 2
        images = np.ones((batch_size, 16, 16, 3), "float32") * labels[:, None, None, None]
        while True:
            yield images, labels

    def evaluation_batches(self, batch_size):
        import tensorflow as tf

        images, labels = next(self.training_batches(7, 0))
        return tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch_size)


@pytest.mark.long
def test_a_stream_is_trained_on_and_evaluated(tmp_path, monkeypatch):
    monkeypatch.setattr(command.stream, "ImageStream", Streamed)
    monkeypatch.setattr(command.stream, "load", lambda *arguments: Streamed())
    arguments = ("--stream", "--dataset=tiny", "--method=cnn", "--steps=2")
    run(tmp_path, *arguments, "--batch_size=8", "--verbose=0", "--nojit_compile")
    records = results(tmp_path, "cnn9_tiny_all_2")
    assert records.setting["test_examples"] == 7
    (record,) = records.runs
    assert "test_accuracy" in record
    assert "validation_accuracy" not in record


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method=dynamic_sns",), "`method` must be one of 'cnn', 'cnn_plus'"),
        (("--steps=5", "--budget=0.1"), "`steps`, `budget` and `epochs` exclude"),
        (("--stream", "--train_size=9"), "`train_size` and `stream` exclude each other"),
        (("--stream", "--input=unit"), "`input` and `stream` exclude each other"),
        (("--stream", "--augmentation=flip"), "`augmentation` and `stream` exclude"),
        (("--stream", "--tune"), "`tune` and `stream` exclude each other"),
        (("--stream", "--tuned"), "`tuned` and `stream` exclude each other"),
        (("--budget=0.000001",), "must leave at least one step"),
        (("--budget=0",), "must leave at least one step"),
        (("--steps=0",), "must leave at least one step"),
    ],
    ids=str,
)
def test_errors(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, *arguments)
