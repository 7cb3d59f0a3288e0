"""Training the networks of Neural Similarity Learning, in small: recipe, resume, tables."""

import dataclasses
import json
import types
from typing import ClassVar

import keras
import numpy as np
import pytest
from absl.testing import flagsaver
from jax_process import run_under_jax
from keras import ops

import nsl_keras
from examples import (
    image_data,
    image_recipe,
    image_stream,
    neural_similarity,
    neural_similarity_table,
    run_records,
    similarity_methods,
)


def run(folder, *arguments):
    """The example in this process, with flags as on the command line."""
    with flagsaver.flagsaver():
        neural_similarity.FLAGS.unparse_flags()
        folders = (f"--output_dir={folder}", f"--state_dir={folder}/unfinished")
        neural_similarity.FLAGS(["test", *folders, *arguments])
        neural_similarity.main(["test"])


SMALL = (
    *("--train_size=64", "--batch_size=16", "--iterations=4", "--verbose=0"),
    "--nojit_compile",
)


def test_digits_end_to_end(tmp_path, capsys):
    run(tmp_path, *SMALL, "--method=cnn", "--method=static_dns")
    path = tmp_path / "results" / "neural_similarity_cnn9_digits_64_4.json"
    content = json.loads(path.read_text())
    assert content["setting"]["train_examples"] == 64
    assert content["setting"]["recipe"]["rate_drops"] == [2, 3]
    assert content["setting"]["recipe"]["batch_normalization_momentum"] == 0.9
    plain, static = content["runs"]
    assert (plain["method"], static["method"]) == ("cnn", "static_dns")
    for record in content["runs"]:
        assert record["seed"] == 0
        assert 0 <= record["validation_accuracy"] <= 1
        assert 0 <= record["test_accuracy"] <= record["test_top_5"] <= 1
        assert record["images_per_second"] > 0
        assert "examples.neural_similarity" in record["command"]
        assert keras.__version__ == record["versions"]["keras"]
    assert static["parameters"] == plain["parameters"] + 9 * 9
    output = capsys.readouterr().out
    assert "| static NSN, DNS | 7.15 |" in output
    assert "| dynamic NSN, DNS | 6.85 | not run |" in output

    # What is finished is not run again, for another table of the same setting neither.
    run(tmp_path, *SMALL, "--table=3", "--method=cnn", "--method=dynamic_dns")
    assert "CNN, seed 0: finished before" in capsys.readouterr().out
    again = json.loads(path.read_text())
    assert again["runs"][:2] == content["runs"]
    assert [record["method"] for record in again["runs"][2:]] == ["dynamic_dns"]
    assert neural_similarity_table.tables_of(path) == ["1", "2", "3", "4"]
    assert "Table 3. Shared" in neural_similarity_table.section(path, ["3"])

    with pytest.raises(ValueError, match=r"runs of another setting.*'learning_rate': 0.1"):
        run(tmp_path, *SMALL, "--method=cnn", "--learning_rate=0.5")


def test_jax_from_a_file_without_tensorflow(tmp_path, capsys):
    file = f"{tmp_path}/digits.npz"
    run(tmp_path, "--train_size=64", f"--write_data_file={file}")
    assert f"Wrote {file}" in capsys.readouterr().out
    run_under_jax(
        "examples.neural_similarity",
        *(f"--data_file={file}", f"--output_dir={tmp_path}"),
        f"--state_dir={tmp_path}/unfinished",
        *("--iterations=2", "--batch_size=8", "--method=cnn", "--verbose=0"),
    )
    path = tmp_path / "results" / "neural_similarity_cnn9_digits_all_2.json"
    (record,) = json.loads(path.read_text())["runs"]
    assert record["versions"]["backend"].startswith("jax ")
    assert "--data_file=DATA_FILE" in record["command"]


TINY = dataclasses.replace(
    image_recipe.RECIPES["paper"].scaled(6),
    batch_size=8,
    batch_normalization_momentum=0.9,
)


def tiny_data(count=40):
    rng = np.random.default_rng(0)
    images = rng.random((count, 8, 8, 3)).astype("float32")
    return image_data.Split(images, rng.integers(0, 4, count))


def tiny_model(recipe=TINY, **options):
    keras.utils.set_random_seed(3)
    backbone = nsl_keras.backbones.cnn9((8, 8, 3), 4, filters=(4, 4, 4), **options)
    return image_recipe.trainable(backbone, recipe, jit_compile=False)


def batches():
    return image_recipe.Batches(tiny_data(), TINY, seed=0)


class Interruption(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(image_recipe, "chunk_steps", lambda iterations: 2)
    whole = tiny_model(similarity="diagonal")
    record = image_recipe.fit(whole, batches(), TINY, tmp_path / "whole")
    assert np.isfinite(record["training_loss"])
    assert not (tmp_path / "whole" / "seconds.json").exists()

    folder = tmp_path / "interrupted"
    first = tiny_model(similarity="diagonal")
    with pytest.raises(KeyboardInterrupt):
        image_recipe.fit(first, batches(), TINY, folder, [Interruption(1)])
    assert len(json.loads((folder / "seconds.json").read_text())) == 2
    second = tiny_model(similarity="diagonal")
    image_recipe.fit(second, batches(), TINY, folder)
    assert int(second.optimizer.iterations) == 6
    differs = False
    for ours, other, stopped in zip(
        second.variables, whole.variables, first.variables, strict=True
    ):
        ours, other, stopped = map(ops.convert_to_numpy, (ours, other, stopped))
        np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-5)
        differs |= bool(np.max(np.abs(stopped - other)) > 1e-3)
    assert differs


def test_a_diverging_run_is_named(tmp_path):
    recipe = dataclasses.replace(TINY, learning_rate=1e30)
    with pytest.raises(nsl_keras.NonFiniteLossError, match="loss is nan"):
        image_recipe.fit(tiny_model(recipe), batches(), recipe, tmp_path)


def test_published_recipes():
    recipes = image_recipe.RECIPES
    paper = recipes["paper"]
    rate = image_recipe.optimizer(paper)._learning_rate
    rates = [float(rate(step)) for step in (0, 34_000, 34_001, 54_001)]
    np.testing.assert_allclose(rates, [0.1, 0.1, 0.01, 0.001], rtol=1e-5)
    assert image_recipe.optimizer(paper).momentum == 0.9
    assert not image_recipe.optimizer(paper).nesterov
    assert (recipes["code"].rate_drops, recipes["code"].iterations) == (
        (20_000, 30_000, 37_500),
        42_500,
    )
    short = paper.scaled(640)
    assert (short.iterations, short.rate_drops) == (640, (340, 540))
    adam = image_recipe.optimizer(recipes["attention"])
    assert isinstance(adam, keras.optimizers.Adam)
    assert adam.epsilon == 1e-8


@pytest.mark.parametrize(
    ("options", "decayed_similarity"),
    [
        ({"similarity": "diagonal"}, None),
        ({"similarity": "unconstrained"}, 2.5e-3),
        ({"similarity": "unconstrained", "predictor": "sphere"}, None),
    ],
    ids=str,
)
def test_decay_is_that_of_the_authors(options, decayed_similarity):
    model = tiny_model(**options)
    expected = 0.0
    for variable in model.trainable_variables:
        value = ops.convert_to_numpy(variable).astype("float64")
        if variable.name in ("kernel", "gamma", "beta"):
            expected += 2.5e-4 * np.sum(value**2)
        elif decayed_similarity is not None and variable.name == "similarity":
            expected += decayed_similarity * np.sum(value**2)
    np.testing.assert_allclose(float(sum(model.losses)), expected, rtol=1e-5)


def test_inputs_are_scaled_as_published():
    for name, expected in (("paper", (0, 255)), ("attention", (-0.996094, 0.996094))):
        recipe = image_recipe.RECIPES[name]
        backbone = keras.Sequential([keras.Input((2,)), keras.layers.Identity()])
        model = image_recipe.trainable(backbone, recipe)
        found = ops.convert_to_numpy(model(np.array([[0.0, 1.0]], "float32")))
        np.testing.assert_allclose(found[0], expected, rtol=1e-5)


def test_batches_are_passes_over_all_images():
    split = image_data.Split(np.arange(20.0).reshape(20, 1, 1, 1), np.arange(20))
    recipe = dataclasses.replace(TINY.scaled(5), batch_size=8, augmentation="none")
    made = image_recipe.Batches(split, recipe, seed=0)
    assert len(made) == 5
    seen = np.concatenate([made[index][1] for index in range(5)])
    for start in (0, 20):
        assert sorted(seen[start : start + 20]) == list(range(20))
    assert list(seen[:20]) != list(seen[20:])
    # From the middle: the third batch reaches into the second pass.
    again = image_recipe.Batches(split, recipe, seed=0)
    np.testing.assert_array_equal(again[3][1], seen[24:32])
    np.testing.assert_array_equal(again[2][1], seen[16:24])
    assert list(image_recipe.Batches(split, recipe, seed=1)[0][1]) != list(seen[:8])


@pytest.mark.parametrize("augmentation", image_recipe.AUGMENTATIONS[:-1])
def test_augmentation(augmentation):
    rng = np.random.default_rng(0)
    images = rng.random((200, 6, 6, 2)).astype("float32")
    found = image_recipe.augmented(images, augmentation, np.random.default_rng(1))
    assert found.shape == images.shape
    mode = "constant" if augmentation.startswith("pad") else "symmetric"
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)), mode=mode)
    shifts = range(9) if "crop" in augmentation else [4]
    mirrors = (1, -1) if "flip" in augmentation else (1,)
    seen = set()
    for image, source in zip(found, padded, strict=True):
        places = [
            (row, column, mirror)
            for row in shifts
            for column in shifts
            for mirror in mirrors
            if np.array_equal(
                image, source[row : row + 6, column : column + 6][:, ::mirror]
            )
        ]
        assert places, "not a shifted, mirrored copy of its image"
        seen.update(places)
    # Of 162 places 200 images find most.
    assert len(seen) > 0.6 * len(shifts) ** 2 * len(mirrors)


def test_cutout():
    images = np.ones((300, 32, 24, 1), "float32")
    whole, cut = (
        image_recipe.augmented(images, augmentation, np.random.default_rng(1))
        for augmentation in ("pad_crop_flip", "pad_crop_flip_cutout")
    )
    # The same images but for the square, which the border may cut.
    assert np.all((cut == whole) | (cut == 0))
    sizes = [
        [np.ptp(np.flatnonzero(image.min(axis)[:, 0] == 0)) + 1 for axis in (1, 0)]
        for image in 1 - (whole - cut)
    ]
    assert np.max(sizes, axis=0).tolist() == [16, 16]
    assert np.min(sizes) >= 4


@pytest.mark.parametrize(
    ("iterations", "steps"), [(64_000, 500), (42_500, 500), (60, 60), (997, 997)]
)
def test_state_is_saved_at_whole_parts_of_the_training(iterations, steps):
    assert image_recipe.chunk_steps(iterations) == steps


def test_every_row_of_every_table_can_be_built():
    sizes = {"cnn9": 8, "cnn10": 32, "spherenet": 32}

    tables = similarity_methods.TABLES.values()
    # Tables share rows, which are built once.
    rows = {(t.network, name): row for t in tables for name, row in t.methods.items()}
    parameters = {}
    for (network, name), row in rows.items():
        shape = (sizes[network], sizes[network], 3)
        model = similarity_methods.build(network, row, shape, 10, momentum=0.9)
        assert model.output_shape == (None, 10)
        parameters[network, name] = sum(
            int(np.prod(v.shape)) for v in model.trainable_variables
        )
    for table in tables:
        counts = {}
        for name, method in table.methods.items():
            # Predictors of different kinds have the same parameters.
            counts[name] = (
                parameters[table.network, name],
                method.options.get("predictor"),
                method.options.get("sphere"),
            )
        assert len(set(counts.values())) == len(counts), counts
        assert table.baseline in table.methods


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
    "dataset": "cifar10",
    "train_examples": 45_000,
    "test_examples": 10_000,
    "recipe": dataclasses.asdict(image_recipe.RECIPES["paper"]),
}


def test_table_of_runs(tmp_path):
    records = run_records.RunRecords(tmp_path / "runs.json", SETTING)
    for seed, accuracy in ((0, 0.92), (1, 0.90)):
        records.add(record("cnn", seed, accuracy))
        records.add(record("static_dns", seed, accuracy + 0.01 + 0.01 * seed))
    diverged = record("dynamic_dns_cnn", 0, None, diverged="The training loss is nan.")
    del diverged["test_accuracy"], diverged["images_per_second"]
    records.add(diverged)
    text = neural_similarity_table.section(records.path)
    assert "### cnn9 (code variant) on cifar10: 45,000 images, 64,000 iterations" in text
    assert "| CNN | 7.78 | 9.00 ± 1.41 |  | 0, 1 | 1,234 | 100 |" in text
    row = "| static NSN, DNS | 7.15 | 7.50 ± 0.71 | -1.50 ± 0.71 | 0, 1 | 1,234 | 100 |"
    assert row in text
    assert "| CNN++ | 7.29 | not run |  |  |  |  |" in text
    assert "plain convolutions | 7.04 | diverged in 1 of 1 |" in text
    assert "Table 3." not in text
    again = run_records.RunRecords(records.path, SETTING)
    assert again.holds("cnn", 1)
    assert not again.holds("cnn", 2)


def test_speeds_are_of_accelerators():
    slow = record("cnn", 0, 0.9, devices=["cpu:0"], images_per_second=3.0)
    assert run_records.images_per_second([slow]) == ""
    assert run_records.images_per_second([slow, record("cnn", 1, 0.9)]) == "100"


def test_top_5_errors_of_imagenet(tmp_path):
    setting = {**SETTING, "network": "cnn10", "dataset": "imagenet2012", "variant": None}
    records = run_records.RunRecords(tmp_path / "runs.json", setting)
    records.add(record("dynamic_dns", 0, 0.6, test_top_5=0.8))
    text = neural_similarity_table.section(records.path)
    assert "| dynamic NSN, DNS | 40.61 | 40.00 |  | 0 | 18.04 | 20.00 | 1,234 |" in text


def test_tables_of_which_nothing_was_run():
    text = neural_similarity_table.not_run(["4", "8"])
    assert "| method | cifar10 | cifar100 | here |" in text
    assert "| CNN++ | 7.29 | 28.70 | not run |" in text
    assert "| SphereNet, self-attention | 8.24 | not run |" in text


def test_resized_and_merged_data(tmp_path):
    rng = np.random.default_rng(0)
    image = np.linspace(0, 1, 8, dtype="float32")
    images = np.broadcast_to(image[None, :, None, None], (4, 8, 8, 1))
    split = image_data.Split(images, rng.integers(0, 2, 4))
    data = image_data.ImageData(split, split.take(2), split.take(3), ["a", "b"])
    larger = image_data.resized(data, 16)
    assert larger.validation.images.shape == (2, 16, 16, 1)
    assert np.all(np.diff(larger.train.images[0, :, 0, 0]) >= 0)
    merged = image_data.without_validation(data)
    assert len(merged.train.images) == len(merged.train.labels) == 6
    assert len(merged.validation.images) == 0
    image_data.save_file(data, tmp_path / "data.npz")
    again = image_data.load_file(tmp_path / "data.npz", 3)
    assert again.class_names == ["a", "b"]
    np.testing.assert_allclose(again.train.images, images[:3], atol=0.5 / 255)
    np.savez(tmp_path / "other.npz", train_images=images)
    with pytest.raises(ValueError, match=r"`data_file` must hold .*without train_labels"):
        image_data.load_file(tmp_path / "other.npz")


class TinyBuilder:
    """A tfds builder's stand-in: images of different sizes, class by brightness."""

    class info:  # noqa: N801 (tfds's name)
        splits: ClassVar = {
            name: types.SimpleNamespace(num_examples=count)
            for name, count in (("train", 24), ("validation", 7), ("test", 3))
        }
        features: ClassVar = {
            "label": types.SimpleNamespace(names=["dark", "bright"]),
            "image": types.SimpleNamespace(shape=(None, None, 3)),
        }

    def as_dataset(self, split, shuffle_files=False, read_config=None):
        import tensorflow as tf

        count = self.info.splits[split].num_examples

        def examples():
            for index in range(count):
                shape = (20 + index % 5, 18 + index % 3, 3)
                value = 255 * (index % 2)
                image = np.full(shape, value, "uint8")
                yield {"image": image, "label": np.int64(index % 2)}

        signature = {
            "image": tf.TensorSpec((None, None, 3), tf.uint8),
            "label": tf.TensorSpec((), tf.int64),
        }
        data = tf.data.Dataset.from_generator(examples, output_signature=signature)
        return data.apply(tf.data.experimental.assert_cardinality(count))


def test_a_stream_of_images_of_any_size(tmp_path, monkeypatch):
    stream = image_stream.ImageStream(TinyBuilder(), 16)
    assert stream.evaluated_split == "validation"
    assert stream.image_shape == (16, 16, 3)
    assert stream.counts["test_examples"] == 7
    made = image_stream.StreamedBatches(stream, 8, steps=3, seed=0)
    images, labels = made[0]
    assert images.shape == (8, 16, 16, 3)
    np.testing.assert_allclose(images.mean((1, 2, 3)), labels, atol=1e-6)
    order = [tuple(labels), *(tuple(made[index][1]) for index in (1, 2))]
    # Looked at once more, the first batch is the same; another seed's is not.
    again = image_stream.StreamedBatches(stream, 8, steps=3, seed=0)
    assert [tuple(again[index][1]) for index in (0, 0, 1, 2)][1:] == order
    other = image_stream.StreamedBatches(stream, 8, steps=3, seed=1)
    assert [tuple(other[index][1]) for index in range(3)] != order
    assert sum(len(labels) for _, labels in stream.evaluation_batches(4)) == 7

    # The whole way: trained on, and evaluated on the validation images.
    monkeypatch.setattr(image_stream, "load", lambda *arguments: stream)
    arguments = ("--stream", "--dataset=tiny", "--method=cnn", "--iterations=3")
    run(tmp_path, *arguments, "--batch_size=8", "--verbose=0", "--nojit_compile")
    path = tmp_path / "results" / "neural_similarity_cnn9_tiny_all_3.json"
    content = json.loads(path.read_text())
    assert content["setting"]["test_examples"] == 7
    (record,) = content["runs"]
    assert "test_accuracy" in record
    assert "validation_accuracy" not in record
    assert not list((tmp_path / "unfinished").glob("*/*"))


def test_crops_of_a_stream_are_random():
    example = {
        "image": np.random.default_rng(0).integers(0, 256, (30, 20, 3)),
        "label": np.int64(0),
    }
    stream = image_stream.ImageStream(TinyBuilder(), 16)
    middle, _ = stream._example(example)
    crops = [stream._example(example, np.array([0, n]))[0] for n in range(2)]
    for image in (middle, *crops):
        assert tuple(image.shape) == (16, 16, 3)
    assert np.max(np.abs(np.asarray(crops[0]) - np.asarray(crops[1]))) > 0.1
    same, _ = stream._example(example, np.array([0, 1]))
    np.testing.assert_array_equal(np.asarray(same), np.asarray(crops[1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method=dynamic_sns",), "`method` must be one of 'cnn', 'cnn_plus'"),
        (("--iterations=5", "--budget=0.1"), "`iterations` and `budget` exclude"),
        (("--stream", "--train_size=9"), "`train_size` and `stream` exclude each other"),
        (("--budget=0.000001",), "must leave at least one iteration"),
    ],
    ids=str,
)
def test_errors(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, *arguments)
