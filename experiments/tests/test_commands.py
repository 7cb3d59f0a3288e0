"""Each command trains, resumes and writes its table, in a tiny setting."""

import functools

import keras
import numpy as np
import pytest
from helpers import ROOT, run_python

from experiments import campaign
from experiments.common.recipe import OutOfTime
from experiments.tests.commands import few_shot_file, folders, records, run, run_well

#: The flags of each command.
TINY = {
    "neural_similarity": (
        *("--train_size=32", "--batch_size=16", "--steps=2", "--nojit_compile"),
        *("--filters=4,4,6", "--method=cnn", "--method=static_dns"),
    ),
    "image_classification": (
        *("--train_size=32", "--batch_size=16", "--steps=2", "--nojit_compile"),
        *("--filters=4,4,4,6", "--num_neighbors=20"),
        *("--method=plain", "--method=neighborhoods_film"),
    ),
    "few_shot": (
        *("--dataset=tiny", "--ways=2", "--shots=2", "--queries=3", "--proto_ways=3"),
        *("--training_images=40", "--batch_size=10", "--episodes_per_step=1"),
        *("--test_episodes=4", "--nojit_compile", "--save_every=2"),
        *("--method=finetuning", "--method=nearest_centroid", "--method=proto_net"),
    ),
    "regression": (
        *("--folds=2", "--layers=2", "--units=8", "--decays=0", "--epochs=2"),
        *("--temperatures=0.1", "--num_neighbors=20"),
    ),
}
#: How many runs they ask for, and parts of the table.
FOUND = {
    "neural_similarity": (2, "| static NSN, DNS | ", "; dynamic NSN, DNS"),
    "image_classification": (
        2,
        "| vanilla | ",
        "Not run: MAXL; MAXL by SGD, halved; vanilla + iFiLM",
    ),
    "few_shot": (3, "| nearest centroid | ", "RelationNet; MAML; static NSN"),
    "regression": (4, "| diabetes | 442 | 10 | "),
}


def flags_of(name, folder):
    given = list(folders(folder, models=name == "image_classification"))
    if name != "regression":
        given.append("--verbose=0")
    if name == "few_shot":
        given.append(f"--data_file={few_shot_file(folder)}")
    return (*TINY[name], *given)


@pytest.mark.parametrize("name", TINY)
def test_a_command_stops_goes_on_and_writes_its_table(name, tmp_path, one_thread, eager):
    module, flags = f"experiments.{name}", flags_of(name, tmp_path)
    code, printed = run(module, *flags, "--stop_after_minutes=0")
    assert code == OutOfTime.CODE
    assert "Stopped after 0 steps. The same command goes on." in printed
    assert not records(tmp_path)

    table = run_well(module, *flags)
    made, (count, *rows) = records(tmp_path), FOUND[name]
    assert len(made) == count
    assert all(row in table for row in rows)
    assert not list((tmp_path / "unfinished").glob("*"))
    assert all(f"python -m experiments.{name} " in record["command"] for record in made)

    again = run_well(module, *flags)
    assert again.count("finished before") == count
    assert records(tmp_path) == made
    assert all(row in again for row in rows)


def test_regression_on_features_has_records_of_its_own(tmp_path, eager):
    module, flags = "experiments.regression", flags_of("regression", tmp_path)
    table = run_well(module, *flags, "--features", "--key_deviation=0.1")
    assert "| diabetes, on features, keys from N(0, 0.1²) | 442 |" in table
    names = {record["name"] for record in records(tmp_path)}
    assert names == {"diabetes_features_True_key_deviation_0.1"}


def test_trials_choose_the_rate(tmp_path, eager):
    module = "experiments.image_classification"
    flags = (
        *("--filters=4,4,4,4", "--train_size=16", "--batch_size=16", "--epochs=2"),
        *("--optimizer=adam", "--cosine_decay", "--input=standardized"),
        *("--verbose=0", "--nojit_compile", "--method=plain", "--rates=1e-3,1e30"),
        *folders(tmp_path, models=True),
    )
    assert "| plain | 1e+30 | diverged" in run_well(module, *flags, "--tune")
    trials = records(tmp_path, "image_classification_tuning")
    assert len(trials) == 2
    assert not any("test_accuracy" in trial for trial in trials)
    run_well(module, *flags, "--tuned", "--step_times")
    (record,) = records(tmp_path, "image_classification")
    assert record["learning_rate"] == 1e-3
    assert 0 < record["step_time"]["low"] <= record["step_time"]["high"]
    code, _ = run(module, *flags, "--method=plain_film", "--tuned")
    assert "needs the same trials of every row" in code


#: Commands without TensorFlow.
UNDER_JAX = """
import pathlib, sys
folder, images = pathlib.Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, sys.argv[3])
from experiments.tests import commands, test_commands

OTHERS = ("--method", "--nojit_compile")  # JAX takes longer without compilation.

def run(name, method, *flags):
    made = folder / name
    given = commands.folders(made)
    tiny = [each for each in test_commands.TINY[name] if not each.startswith(OTHERS)]
    flags = (*tiny, f"--method={method}", *given, *flags, f"--data_file={images}")
    commands.run_well(f"experiments.{name}", *flags, "--verbose=0")
    return commands.records(made)

(record,) = run("neural_similarity", "static_dns")
assert record["versions"]["backend"].startswith("jax "), record
assert "--data_file=DATA_FILE" in record["command"]
images = commands.few_shot_file(folder)
assert run("few_shot", "proto_net", "--training_images=20")
"""


#: Runs a module or a file as if no TensorFlow were installed.
WITHOUT_TENSORFLOW = """
import runpy, sys
sys.modules["tensorflow"] = None
name = sys.argv.pop(1)
(runpy.run_path if name.endswith(".py") else runpy.run_module)(name, run_name="__main__")
"""


def run_under_jax(module_or_file, *arguments, timeout=280):
    """Runs a module or a file in a process with JAX and without TensorFlow."""
    arguments = ("-c", WITHOUT_TENSORFLOW, module_or_file, *arguments)
    return run_python(*arguments, timeout=timeout, KERAS_BACKEND="jax")


def test_commands_run_under_jax_without_tensorflow(tmp_path):
    images = f"{tmp_path}/digits.npz"
    written = run_well(
        "experiments.neural_similarity", "--train_size=32", f"--write_data_file={images}"
    )
    assert f"Wrote {images}" in written
    script = tmp_path / "script.py"
    script.write_text(UNDER_JAX)
    run_under_jax(script, tmp_path, images, ROOT / "tests")


CURVES = ("--filters=4,4,4,4", "--train_size=30", "--steps=2", "--num_neighbors=5")
CURVES += ("--nojit_compile", "--verbose=0", "--model_dir={folder}/models")
DEMO = ("--seeds=1", "--epochs=1", "--train_examples=200", "--verbose=0")
DEMO += ("--model=linear", "--model=linear_neighborhoods")


def test_the_demo_goes_on_exports_and_serves(tmp_path, monkeypatch):
    flags = (*DEMO, *folders(tmp_path))
    fit, fits = keras.Model.fit, []

    @functools.wraps(fit)
    def interrupted(self, *arguments, **options):
        fits.append(self)
        if len(fits) == 2:
            raise KeyboardInterrupt
        return fit(self, *arguments, **options)

    monkeypatch.setattr(keras.Model, "fit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run("experiments.demo", *flags)
    printed = run_well("experiments.demo", *flags)
    assert "linear, 0: finished before" in printed
    linear, neighbors = records(tmp_path, "demo")
    assert "step_time_ratio" in linear and "step_time_ratio" in neighbors
    served = linear["served"]
    assert served["agreeing_predictions"] == served["test_images"]
    assert (tmp_path / served["saved_model"] / "saved_model.pb").exists()
    assert "Test accuracy" in (tmp_path / served["saved_model"] / "README.md").read_text()
    assert "| linear features + Meta-Neighborhoods | " in printed
    assert list(tmp_path.glob("results/figures/digits_*.png"))


@pytest.mark.parametrize(
    ("module", "flags", "row", "picture"),
    [
        ("demo.spirals", ["--epochs=3", "--examples=200"], " %", "spirals.png"),
        ("few_shot.sine_waves", ["--iterations=20", "--seeds=1"], "| MAML | ", None),
        ("few_shot.calibration", ["--draws=1", "--shots=2"], "| Finetuner |", None),
        (
            "neural_similarity.implicit_regularization",
            ["--steps=100", "--points=5", "--seeds=1"],
            "| half of each target | M from I / 30 |",
            "implicit_regularization.png",
        ),
        (
            "neural_similarity.predictors",
            ["--seeds=1", "--dataset=cifar_fs", "--network=narrow_cnn", "--method=plain"]
            + ["--method=DNS depthwise", "--data_file={folder}/images.npz"],
            "| DNS depthwise |",
            None,
        ),
        (
            "image_classification",
            [*CURVES, "--experiment=A.3", "--method=plain"],
            "Not run: vanilla, extra layer; MN.",
            "convnet4_4-4-4-4_digits_30_2_A.3.png",
        ),
        (
            "image_classification",
            [*CURVES, "--experiment=A.3", "--method=plain_extra", "--nohold_out"],
            "Not run: vanilla; MN.",
            None,
        ),
        (
            "image_classification",
            [*CURVES, "--experiment=A.4", "--method=neighborhoods"],
            "MN, 2 S; MN, 0.2 / T",
            "convnet4_4-4-4-4_digits_30_2_A.4.png",
        ),
        (
            "image_classification",
            [*CURVES, "--figures", "--method=neighborhoods"],
            "| before adaptation | cosines that rise, % |",
            "convnet4_4-4-4-4_digits_30_2_neighborhoods_feature_map.png",
        ),
    ],
)
def test_smaller_commands_write_tables_and_pictures(
    module, flags, row, picture, tmp_path, one_thread, request
):
    # The steps of others take longer than their tracing.
    if not module.startswith("few_shot"):
        request.getfixturevalue("eager")
    rng = np.random.default_rng(0)
    arrays = {}
    for number, part in enumerate(("train", "validation", "test")):
        arrays[f"{part}_images"] = rng.integers(0, 255, (20, 16, 16, 3), "uint8")
        arrays[f"{part}_labels"] = np.arange(20) + 20 * number
    np.savez(tmp_path / "images.npz", **arrays)
    flags = [flag.format(folder=tmp_path) for flag in flags]
    assert row in run_well(f"experiments.{module}", *flags, *folders(tmp_path))
    figures = tmp_path / "results" / "figures"
    assert picture is None or (figures / picture).stat().st_size > 5000
    assert figures.exists() == (picture is not None)


@pytest.mark.parametrize(
    ("module", "flags", "message"),
    [
        ("neural_similarity", ["epochs=3"], "Unknown arguments: epochs=3."),
        ("neural_similarity", ["--method=x"], "--method must be one of 'cnn', 'cnn_plus'"),
        ("neural_similarity", ["--steps=5", "--epochs=1"], "exclude each other"),
        ("neural_similarity", ["--stream", "--tune"], "--tune and --stream exclude"),
        ("neural_similarity", ["--data_file=no.npz"], "No such file or directory: no.npz"),
        ("image_classification", ["--method=x"], "'plain', .* in table_1"),
        ("image_classification", ["--dataset=pacs"], "must be the folder of pacs's images"),
        ("few_shot", ["--dataset=mine"], "train, validation (or val) and test"),
        ("regression", ["--dataset=gom"], "--data_dir must lead to a file"),
    ],
)
def test_errors_of_flags_and_data_end_in_one_line(module, flags, message, tmp_path):
    code, _ = run(f"experiments.{module}", *folders(tmp_path), *flags)
    assert "\n" not in code
    for part in message.split(".*"):
        assert part in code


def test_the_plan_of_a_device_takes_times_first():
    lines = list(map(" ".join, campaign.commands("device", ["0"])))
    timed = ["--step_times" in line for line in lines]
    assert timed == sorted(timed, reverse=True) and 0 < sum(timed) < len(lines)
    # One file of images, and neither trials nor TensorFlow's streams.
    assert all("--dataset=cifar10" in line for line in lines)
    assert not any("--tune" in line or "--stream" in line for line in lines)
    (maml,) = (line.split() for line in lines if "maml" in line)
    given = dict(flag.split("=") for flag in maml if "=" in flag)
    ways, episodes = int(given["--ways"]), int(given["--episodes_per_step"])
    images = int(given["--shots"]) + int(given["--queries"])
    assert ways * images * episodes == 128


def test_maxl_is_planned_for_tensorflow_alone(monkeypatch):
    def planned():
        return [line for line in campaign.commands("mnist", ["0"]) if "maxl" in line[-2]]

    assert len(planned()) == 1
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    assert not planned()


def test_campaigns_hold_out_the_validation_images_of_the_paper():
    held = {
        plan: {
            "--nohold_out" not in line
            for line in map(" ".join, campaign.commands(plan, ["0"]))
        }
        for plan in ("cinic10", "mnist_m", "pacs", "mnist")
    }
    assert held == {"cinic10": {True}, "mnist_m": {True}, "pacs": {True}, "mnist": {False}}
