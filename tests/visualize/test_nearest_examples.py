"""Entries with their nearest images: which are drawn, and the bars beside them."""

import keras
import numpy as np
import pytest
from keras import ops
from pictures import check_saved

import nsl_keras
from nsl_keras import visualize

RNG = np.random.default_rng(9)
CLASSES = 3
IMAGES = RNG.random((20, 8, 8, 1)).astype("float32")


@pytest.fixture
def model():
    model = nsl_keras.MetaNeighborhoodModel(
        nsl_keras.backbones.convnet4((8, 8, 1), (2, 3, 4, 5)),
        nsl_keras.layers.CosineDense(CLASSES),
        dictionary=12,
    )
    model.build(IMAGES.shape)
    dictionary = model.dictionary
    dictionary.value_logits.assign(RNG.normal(size=(12, CLASSES)))
    return model


def test_learned_neighbors(model, tmp_path):
    figure = visualize.plot_learned_neighbors(model, IMAGES, [4, 0], nearest=5)
    check_saved(figure, tmp_path)
    assert len(figure.axes) == 2 * (1 + 5)
    dictionary = model.dictionary
    values = ops.convert_to_numpy(dictionary.values)
    features = model.features(ops.convert_to_tensor(IMAGES), training=False)
    attention = ops.convert_to_numpy(dictionary.attention(features))
    for row, entry in enumerate([4, 0]):
        bars, *pictures = figure.axes[6 * row : 6 * row + 6]
        assert bars.get_ylabel() == f"entry {entry}"
        heights = [bar.get_height() for bar in bars.patches]
        np.testing.assert_allclose(heights, values[entry], rtol=1e-5)
        (label,) = bars.get_xticklabels()
        assert label.get_text() == str(values[entry].argmax())
        nearest = np.argsort(-attention[:, entry])[:5]
        for picture, index in zip(pictures, nearest, strict=True):
            drawn = np.asarray(picture.images[0].get_array())
            np.testing.assert_array_equal(drawn, IMAGES[index, :, :, 0])


def test_learned_neighbors_take_an_entry_for_each_class(model):
    figure = visualize.plot_learned_neighbors(model, IMAGES, nearest=2, class_names="abc")
    labels = [
        label.get_text() for axis in figure.axes[::3] for label in axis.get_xticklabels()
    ]
    dictionary = model.dictionary
    present = sorted(set(ops.convert_to_numpy(dictionary.values).argmax(axis=1)))
    assert labels == ["abc"[kind] for kind in present]
    assert len(figure.axes) == 3 * len(present)


def test_learned_neighbors_of_colour_images_in_bytes(tmp_path):
    model = nsl_keras.MetaNeighborhoodModel(
        nsl_keras.backbones.convnet4((8, 8, 3), (2, 3, 4, 5)),
        nsl_keras.layers.CosineDense(CLASSES),
        dictionary=6,
    )
    images = RNG.integers(0, 256, size=(7, 8, 8, 3)).astype("uint8")
    model.build(images.shape)
    figure = visualize.plot_learned_neighbors(model, images, [1], nearest=7)
    check_saved(figure, tmp_path)
    drawn = np.asarray(figure.axes[1].images[0].get_array())
    # Matplotlib clips what is above 1: compare with the images, not with the range.
    assert any(np.allclose(drawn, image / 255) for image in images)
    standardised = (images / 127.5 - 1).astype("float32")
    figure = visualize.plot_learned_neighbors(model, standardised, [1], nearest=7)
    drawn = np.asarray(figure.axes[1].images[0].get_array())
    whole = (standardised - standardised.min()) / np.ptp(standardised)
    assert any(np.allclose(drawn, image, atol=1e-6) for image in whole)
    figure = visualize.plot_learned_neighbors(model, 0 * standardised - 1, [1], nearest=7)
    assert np.all(np.asarray(figure.axes[1].images[0].get_array()) == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"nearest": 21},
            r"`nearest` must be at most the number of images, 20.*nearest=21",
        ),
        ({"nearest": 0}, r"`nearest` must be a positive integer.*nearest=0"),
        (
            {"entries": [0, 12]},
            r"`entries` must be dictionary entries 0 to 11.*entries=\[0, 12\]",
        ),
        ({"entries": [-1]}, r"`entries` must be dictionary entries .*entries=\[-1\]"),
    ],
    ids=str,
)
def test_errors_of_learned_neighbors(options, message, model):
    with pytest.raises(ValueError, match=message):
        visualize.plot_learned_neighbors(model, IMAGES, **options)


def test_error_of_a_regression():
    regression = nsl_keras.MetaNeighborhoodModel(
        None, keras.layers.Dense(2), dictionary=4, task="regression"
    )
    with pytest.raises(ValueError, match=r"`model` must be a classifier.*'regression'"):
        visualize.plot_learned_neighbors(regression, IMAGES)
