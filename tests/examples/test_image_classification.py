"""Training image classifiers with neighbours, in small: recipe, resume, tables."""

import dataclasses
import functools
import json

import keras
import numpy as np
import pytest
from absl.testing import flagsaver
from jax_process import run_under_jax
from keras import ops

import nsl_keras
from examples import (
    image_classification,
    image_classification_table,
    image_data,
    image_recipe,
    neighborhood_methods,
    neighborhood_pictures,
    neighborhood_recipe,
    run_records,
)

EXPERIMENTS = neighborhood_methods.EXPERIMENTS


def folders(folder):
    return (
        f"--output_dir={folder}",
        f"--state_dir={folder}/unfinished",
        f"--model_dir={folder}/models",
    )


def run(folder, *arguments):
    """The example in this process, with flags as on the command line."""
    with flagsaver.flagsaver():
        image_classification.FLAGS.unparse_flags()
        image_classification.FLAGS(["test", *folders(folder), *arguments])
        image_classification.main(["test"])


@pytest.fixture
def narrow(monkeypatch):
    """A network of few filters."""
    convnet4 = functools.partial(nsl_keras.backbones.convnet4, filters=(4, 4, 4, 6))
    monkeypatch.setitem(neighborhood_methods.BACKBONES, "convnet4", convnet4)


SMALL = (
    *("--train_size=64", "--batch_size=16", "--iterations=4", "--num_neighbors=30"),
    "--verbose=0",
)


def test_digits_end_to_end(tmp_path, capsys, narrow, one_thread):
    run(tmp_path, *SMALL, "--method=plain", "--method=neighborhoods_film")
    path = tmp_path / "results" / "image_classification_convnet4_digits_64_4.json"
    content = json.loads(path.read_text())
    setting = content["setting"]
    assert setting["recipe"]["rate_drops"] == [3]
    assert setting["recipe"]["num_neighbors"] == 30
    assert setting["sgd"] == {"iterations": 4, "rate_drops": [3, 3], "learning_rate": 0.1}
    plain, neighborhoods = content["runs"]
    assert plain["method"] == "plain"
    assert neighborhoods["method"] == "neighborhoods_film"
    for record in content["runs"]:
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
    figures = sorted(file.name for file in (tmp_path / "results" / "figures").iterdir())
    assert figures == [
        f"convnet4_digits_neighborhoods_film_{name}.png"
        for name in ("adaptation", "entries", "feature_map", "prototype_cosines")
    ]
    assert json.loads(path.read_text()) == content

    # Rows of another experiment go into the same file.
    run(tmp_path, *SMALL, "--experiment=A.6", "--method=plain_dot_sgd")
    assert image_classification_table.experiments_of(path) == ["table_1", "A.6"]
    with pytest.raises(ValueError, match=r"another setting.*'temperature': 0.2"):
        run(tmp_path, *SMALL, "--temperature=0.5")
    with pytest.raises(ValueError, match="`figures` needs trained models"):
        run(
            tmp_path,
            *(*SMALL, "--method=plain", "--figures"),
            f"--model_dir={tmp_path}/none",
        )


def test_coarse_classes(tmp_path, capsys, narrow, one_thread):
    run(tmp_path, *SMALL, "--experiment=A.9", "--figures")
    path = tmp_path / "results" / "image_classification_convnet4_digits_coarse_64_4.json"
    content = json.loads(path.read_text())
    assert content["setting"]["classes"] == 2
    for record in content["runs"]:
        assert 0.1 < record["induction_accuracy"] <= 1
    figures = sorted(file.name for file in (tmp_path / "results" / "figures").iterdir())
    assert figures == [
        f"convnet4_digits_{name}_subcategories.png" for name in ("neighborhoods", "plain")
    ]
    assert "fine classes, by nearest images" in capsys.readouterr().out
    assert image_classification_table.experiments_of(path) == ["A.9"]


def test_induction_accuracy_is_of_fine_classes(one_thread):
    rng = np.random.default_rng(0)
    directions = np.eye(4, dtype="float32")

    def split(count):
        labels = np.arange(count) % 4
        noise = 0.05 * rng.normal(size=(count, 4))
        return image_data.Split((directions[labels] + noise).astype("float32"), labels)

    data = image_data.ImageData(split(40), split(0), split(12), list("abcd"))
    seeing = keras.Sequential([keras.Input((4,)), keras.layers.Identity()])
    blind = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(ops.zeros_like)])
    assert neighborhood_pictures.induction_accuracy(seeing, data) == 1
    assert neighborhood_pictures.induction_accuracy(blind, data) <= 0.5
    model = nsl_keras.MetaNeighborhoodModel(nsl_keras.layers.CosineDense(2), None, 4)
    model.build((None, 4))
    model.neighborhood.dictionary.assign(directions, np.eye(2)[[0, 0, 1, 1]])
    assert neighborhood_pictures.induction_accuracy(model, data) == 1


def test_jax_from_a_file_without_tensorflow(tmp_path):
    file = f"{tmp_path}/digits.npz"
    run(tmp_path, "--train_size=64", f"--write_data_file={file}")
    run_under_jax(
        "examples.image_classification",
        *(f"--data_file={file}", *folders(tmp_path)),
        *("--iterations=2", "--batch_size=8", "--num_neighbors=20", "--verbose=0"),
        *("--method=neighborhoods", "--figures"),
    )
    path = tmp_path / "results" / "image_classification_convnet4_digits_all_2.json"
    (record,) = json.loads(path.read_text())["runs"]
    assert record["versions"]["backend"].startswith("jax ")
    assert "test_unadapted_accuracy" in record
    for flag in ("data_file", "state_dir", "model_dir"):
        assert f"--{flag}={flag.upper()}" in record["command"]
    assert len(list((tmp_path / "results" / "figures").iterdir())) == 4


TINY = dataclasses.replace(
    neighborhood_recipe.published("cifar10").scaled(6), batch_size=8, num_neighbors=12
)


def tiny_model(name, recipe=TINY):
    keras.utils.set_random_seed(3)
    method = neighborhood_methods.METHODS[name]
    model = neighborhood_methods.build(method, "convnet4", (8, 8, 3), 4, recipe, 0)
    neighborhood_recipe.compile_model(model, recipe, method.optimizer, jit_compile=False)
    return model


class Interruption(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch, narrow):
    """The state of dictionary dropout included."""
    monkeypatch.setattr(image_recipe, "chunk_steps", lambda iterations: 2)
    rng = np.random.default_rng(0)
    images = rng.random((40, 8, 8, 3)).astype("float32")
    split = image_data.Split(images, rng.integers(0, 4, 40))

    def fit(folder, callbacks=None):
        model = tiny_model("neighborhoods_film")
        batches = image_recipe.Batches(split, TINY, seed=0)
        image_recipe.fit(model, batches, TINY, tmp_path / folder, callbacks)
        return model

    whole = fit("whole")
    with pytest.raises(KeyboardInterrupt):
        fit("interrupted", [Interruption()])
    resumed = fit("interrupted")
    assert int(resumed.optimizer.iterations) == 6
    for ours, other in zip(resumed.variables, whole.variables, strict=True):
        ours, other = (ops.convert_to_numpy(v).astype("float64") for v in (ours, other))
        np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-5)


def test_published_recipes():
    cifar = neighborhood_recipe.published("cifar100")
    rate = cifar.rates()
    rates = [float(rate(step)) for step in (0, 120_000, 120_001)]
    np.testing.assert_allclose(rates, [1e-3, 1e-3, 1e-4], rtol=1e-5)
    assert (cifar.iterations, cifar.batch_size) == (160_000, 128)
    assert cifar.augmentation == "pad_crop_flip"
    assert neighborhood_recipe.published("mnist").augmentation == "pad_crop"
    assert neighborhood_recipe.published("cinic10").rate_drops == (160_000,)
    sgd = neighborhood_recipe.published("cifar10", "sgd")
    assert (sgd.iterations, sgd.learning_rate) == (120_000, 0.1)
    entries = neighborhood_methods.published_num_neighbors
    assert (entries("cifar10"), entries("cifar100")) == (5_000, 10_000)


@pytest.mark.parametrize("name", ["plain", "neighborhoods_film"])
def test_decay_spares_classifier_and_dictionary(name, narrow):
    """With gradients of zero a step of rate 1e-3 takes 7.5e-5 of the rest."""
    model = tiny_model(name)
    assert model.optimizer.clipvalue == 10
    before = [ops.convert_to_numpy(variable) for variable in model.trainable_variables]
    zeros = [ops.zeros_like(variable) for variable in model.trainable_variables]
    model.optimizer.apply(zeros, model.trainable_variables)
    spared = {"kernel": 1, "scale": 1}
    if name == "neighborhoods_film":
        spared |= {"keys": 1, "value_logits": 1, "inner_learning_rate_0": 1}
    for variable, old in zip(model.trainable_variables, before, strict=True):
        new = ops.convert_to_numpy(variable)
        if np.array_equal(new, old) and np.any(old):
            spared[variable.name] -= 1
        else:
            np.testing.assert_allclose(new, (1 - 7.5e-5) * old, rtol=1e-6)
    assert set(spared.values()) == {0}, spared


def test_sgd_is_that_of_the_authors():
    model = tiny_model("plain_sgd")
    assert model.optimizer.nesterov
    assert model.optimizer.momentum == 0.9
    expected = sum(
        1e-4 * np.sum(ops.convert_to_numpy(variable).astype("float64") ** 2)
        for variable in model.layers[0].trainable_variables
        if variable.name == "kernel"
    )
    np.testing.assert_allclose(float(sum(model.losses)), expected, rtol=1e-5)


def parameters(model):
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


def test_every_method_can_be_built(narrow):
    made = {name: tiny_model(name) for name in neighborhood_methods.METHODS}
    images = np.ones((2, 8, 8, 3), "float32")
    assert {tuple(model(images).shape) for model in made.values()} == {(2, 4)}
    head = made["neighborhoods"].neighborhood
    assert head.num_neighbors == 12
    assert made["neighborhoods_size_2"].neighborhood.num_neighbors == 24
    peaked = made["neighborhoods_peak_4"].neighborhood
    np.testing.assert_allclose(peaked.temperature, head.temperature / 4)
    assert made["neighborhoods_3_diagonal"].neighborhood.inner_steps == 3
    assert made["neighborhoods_3_diagonal"].neighborhood.learning_rate_form == "diagonal"
    for experiment in EXPERIMENTS.values():
        assert set(experiment.names) <= set(made)


def test_the_extra_layer_has_as_many_parameters_as_the_dictionary():
    recipe = dataclasses.replace(TINY, num_neighbors=5000)
    counts = {
        name: parameters(tiny_model(name, recipe))
        for name in ("plain", "plain_extra", "neighborhoods")
    }
    extra = counts["plain_extra"] - counts["plain"]
    np.testing.assert_allclose(extra, counts["neighborhoods"] - counts["plain"], rtol=1e-3)


#: One of each kind of network, for what they have in common.
SHALLOW = ("convnet4", "resnet29", "densenet40")


@pytest.mark.parametrize("backbone", neighborhood_methods.BACKBONES)
def test_backbones(backbone):
    expected = {"convnet4": 520_056, "resnet29": 838_160, "resnet56": 1_655_120}
    expected |= {"densenet76": 484_140, "densenet40": 174_792}
    names = ("plain", "plain_dot") if backbone in SHALLOW else ("plain",)
    for name in names:
        method = neighborhood_methods.METHODS[name]
        model = neighborhood_methods.build(method, backbone, (32, 32, 3), 10, TINY, 0)
        features, head = model.layers
        assert parameters(features) == expected[backbone]
        assert isinstance(head, keras.layers.Dense) == method.dot_product
        relus = [layer.name for layer in features.layers[-2:] if "re_lu" in layer.name]
        assert bool(relus) == (method.dot_product and backbone != "convnet4")


def test_coarse_classes_cover_all():
    for dataset, groups in neighborhood_methods.COARSE_CLASSES.items():
        count = 100 if dataset == "cifar100" else 10
        assert sorted(fine for group in groups for fine in group) == list(range(count))


def test_published_figures_are_whole():
    table_1, table_3 = EXPERIMENTS["table_1"].published, EXPERIMENTS["A.5"].published
    assert len(table_1) == 17
    assert len(table_3) == 14
    for where, figures in table_3.items():
        for name in ("plain", "neighborhoods"):
            assert figures[name] == table_1[where][name], where


SETTING = {
    "backbone": "resnet29",
    "dataset": "cifar10",
    "train_examples": 45_000,
    "test_examples": 10_000,
    "classes": 10,
    "recipe": dataclasses.asdict(neighborhood_recipe.published("cifar10")),
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
    path = tmp_path / "image_classification_resnet29_cifar10_all_160000.json"
    records = run_records.RunRecords(path, SETTING)
    for seed, accuracy in ((0, 0.92), (1, 0.90)):
        records.add(record("plain", seed, accuracy))
        more = {"test_unadapted_accuracy": accuracy - 0.1}
        records.add(record("neighborhoods", seed, accuracy + 0.01 + 0.01 * seed, **more))
    diverged = record("plain_film", 0, None, diverged="The training loss is nan.")
    del diverged["test_accuracy"], diverged["images_per_second"]
    records.add(diverged)
    text = image_classification_table.section(path)
    assert "### resnet29 on cifar10, 10 classes: 45,000 images, 160,000 iter" in text
    assert "| vanilla | 95.06 | 91.00 ± 1.41 |  |  | 0, 1 | 1,234 | 100 |" in text
    row = "| MN | 95.56 | 92.50 ± 0.71 | +1.50 ± 0.71 | 81.00 ± 1.41 | 0, 1 | 1,234 | 100 |"
    assert row in text
    assert "| vanilla + iFiLM | 95.17 | diverged in 1 of 1 |" in text
    assert "| MN + iFiLM | 95.58 | not run | | | | | |" in text
    assert "Appendix" not in text

    rest = image_classification_table.not_run([path])
    assert "| resnet29 | cifar10 | 95.06 | 95.31" not in rest
    assert "| resnet29 | cifar100 | 76.51 | 77.94" in rest
    assert "| resnet56 | imagenet | 48.41 | 48.83 | 52.03 | 51.85 | 54.23 | not run" in rest
    assert "Table 3 (Appendices A.5 and A.6)" in rest
    assert "Appendix A.3, Figure 7. As many parameters in an extra layer: not run." in rest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method=plain_extra",), "`method` must be one of 'plain', .* in table_1"),
        (("--iterations=5", "--budget=0.1"), "`iterations` and `budget` exclude"),
        (("--temperature=0", "--method=neighborhoods", *SMALL), "`temperature` must be"),
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
