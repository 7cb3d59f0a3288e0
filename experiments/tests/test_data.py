"""Images and tables that the examples read, and the parts that they are split into."""

import dataclasses
import os

import numpy as np
import pytest

from experiments.common import data as image_data
from experiments.common.recipe import Recipe
from experiments.common.stream import ImageStream, StreamedBatches
from experiments.few_shot import data as few_shot_data
from experiments.regression import data as regression_data
from experiments.tests.commands import tiny_images

PARTS = image_data.PARTS
DATA = os.environ.get("NSL_KERAS_DATA_DIR")


def test_no_class_is_in_two_parts():
    with pytest.raises(ValueError, match="`validation` and `test` must have no class"):
        dataclasses.replace(tiny_images(), test=tiny_images().validation)


def test_parts_of_the_same_classes_keep_some_each(tmp_path):
    data = make_data(40).changed(
        lambda s: image_data.Split(s.images, np.arange(len(s.labels)) % 4)
    )
    image_data.save_file(data, tmp_path / "images.npz")
    found = few_shot_data.load("mine", data_file=tmp_path / "images.npz")
    kept = [np.unique(getattr(found, part).labels).tolist() for part in PARTS]
    assert sorted(np.concatenate(kept)) == [0, 1, 2, 3] and len(kept[0]) == 2
    chosen = np.isin(data.train.labels, kept[0])
    np.testing.assert_array_equal(found.train.images, data.train.images[chosen])


def test_turned_images_are_new_classes():
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 3, 2), "uint8")
    labels = np.array([40, 7, 40, 9, 7, 9])
    more, numbers = few_shot_data.rotated_classes(images, labels)
    assert more.shape == (24, 3, 3, 2) and more.dtype == np.uint8
    ranks = np.array([2, 0, 2, 1, 0, 1])
    assert numbers.tolist() == [*ranks, *ranks + 3, *ranks + 6, *ranks + 9]
    for turn, row, column in np.ndindex(4, 3, 3):
        r, c = row, column
        for _ in range(turn):
            r, c = 2 - c, r  # Anticlockwise.
        turned = more[6 * turn : 6 * turn + 6, r, c]
        np.testing.assert_array_equal(turned, images[:, row, column])


def test_resized_images_keep_their_bytes():
    images = np.zeros((2, 4, 4, 1), "uint8")
    images[:, 2:] = 255
    found = few_shot_data.resized(image_data.Split(images, np.arange(2)), 2)
    assert found.images.dtype == np.uint8 and found.images.shape == (2, 2, 2, 1)
    assert found.images[0, 0].max() < 60 < 195 < found.images[0, 1].min()
    assert found.labels.tolist() == [0, 1]


def make_data(count):
    rng = np.random.default_rng(0)
    splits = [
        image_data.Split(
            rng.integers(0, 256, (size, 8, 8, 3)).astype("uint8"), rng.integers(0, 4, size)
        )
        for size in (count, 5, 7)
    ]
    return image_data.ImageData(*splits, ["a", "b", "c", "d"])


def test_files_come_back(tmp_path):
    data = make_data(40)
    image_data.save_file(data, f"{tmp_path}/one.npz")
    one = image_data.load_file(f"{tmp_path}/one.npz")
    for part in PARTS:
        expected = getattr(data, part).images / np.float32(255)
        np.testing.assert_allclose(getattr(one, part).images, expected, rtol=1e-6)
    # Files of other images have other settings.
    image_data.save_file(make_data(41), f"{tmp_path}/other.npz")
    assert image_data.load_file(f"{tmp_path}/other.npz").fingerprint != one.fingerprint
    assert image_data.without_validation(one).fingerprint == one.fingerprint


# Tables of numbers.


def test_folds_leak_nothing():
    rng = np.random.default_rng(0)
    data = regression_data.RegressionData(
        "mine", rng.normal(3, 5, size=(101, 4)), rng.normal(size=(101, 2))
    )
    data.y[:, 0] = np.arange(101)
    tested = []
    for fold in regression_data.folds(data, 5, 0.25, seed=3):
        parts = (fold.train, fold.validation, fold.test)
        np.testing.assert_allclose(fold.train.x.mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(fold.train.y.std(axis=0), 1, rtol=1e-5)
        # All rows are there once, on the scale of the training part.
        rows = np.sort(np.concatenate([part.y[:, 0] for part in parts]))
        np.testing.assert_allclose(np.diff(rows), rows[1] - rows[0], rtol=1e-3)
        tested += np.round((fold.test.y[:, 0] - rows[0]) / (rows[1] - rows[0])).tolist()
    assert sorted(tested) == list(range(101))


# Real sets, where NSL_KERAS_DATA_DIR names prepared copies.


@pytest.mark.skipif(DATA is None, reason="NSL_KERAS_DATA_DIR is not set")
def test_prepared_sets():
    data = image_data.load("mnist", DATA, train_examples=100)
    assert data.image_shape == (28, 28, 1)
    assert len(data.test.labels) == 10_000
    images = few_shot_data.load("omniglot", DATA)
    assert images.counts["train_classes"] == (964 - 100) * 4
    assert images.counts["test_classes"] == 659
    # Bright strokes on black.
    assert images.test.images.mean() < 50 and images.test.images.max() > 200


def prepared_images(folder, size, count=24):
    """A set that tensorflow-datasets has prepared; images are of one size, or of many."""
    tfds = pytest.importorskip("tensorflow_datasets")
    rng = np.random.default_rng(0)

    def split():
        shapes = [(size or rng.integers(70, 80), size or 90, 3) for _ in range(count)]
        return [
            {"image": rng.integers(0, 256, shape, "uint8"), "label": number % 3}
            for number, shape in enumerate(shapes)
        ]

    splits = {"train": split(), "validation": split()}
    tfds.dataset_builders.store_as_tfds_dataset(
        name="tiny",
        version="1.0.0",
        data_dir=folder,
        features=tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(size, size, 3), encoding_format="png"),
                "label": tfds.features.ClassLabel(num_classes=3),
            }
        ),
        split_datasets={name: enumerate(each) for name, each in splits.items()},
    )
    return splits


@pytest.mark.parametrize(("size", "made"), [(64, None), (None, 64)])
def test_streams_read_prepared_images_while_training(size, made, tmp_path):
    splits = prepared_images(tmp_path, size)
    found = ImageStream(image_data.prepared_builder("tiny", tmp_path), made)
    assert (found.image_shape, len(found.class_names)) == ((64, 64, 3), 3)
    recipe = Recipe(steps=6, batch_size=8, augmentation="flip")
    batches = StreamedBatches(found, recipe, seed=1, chunk=3)
    images, _ = batches[0]
    assert images.shape == (8, 64, 64, 3) and 0.3 < images.mean() < 0.7
    again = StreamedBatches(found, recipe, seed=1, chunk=3)
    np.testing.assert_array_equal(again[0][0], images)
    again.epoch = 1
    assert np.abs(again[0][0] - images).max() > 0
    evaluated, _ = next(found.batches("validation", 24).as_numpy_iterator())
    if made is None:  # As they are, and mirrored in training.
        expected = {np.float32(e["image"]).mean() / 255 for e in splits["validation"]}
        np.testing.assert_allclose(
            sorted(evaluated.mean((1, 2, 3))), sorted(expected), 1e-5
        )
        known = [np.float32(each["image"]) / 255 for each in splits["train"]]
        for image in images:
            looks = [np.abs(image - view).max() for k in known for view in (k, k[:, ::-1])]
            assert min(looks) < 1e-6
