"""What pictures read from models and data of any form."""

import keras
import numpy as np
import pytest
from pictures import attention_of, small_model

from nsl_keras import visualize
from nsl_keras.visualize import reading

RNG = np.random.default_rng(9)
IMAGES = RNG.random((20, 4, 4, 1)).astype("float32")
X = RNG.normal(size=(20, 6)).astype("float32")


def test_attention_and_features():
    model = small_model(keras.layers.Dense(3))
    expected = attention_of(model, X)
    np.testing.assert_allclose(reading.attention_of(model, X), expected, atol=1e-6)
    assert reading.features_of(model, X).shape == (20, 5)


def test_images_among_several_inputs():
    inputs = {"vector": X, "image": IMAGES}
    assert reading.images_in(inputs) is IMAGES
    assert reading.images_in([X]) is None
    keras.config.set_image_data_format("channels_first")
    try:
        found = reading.images_in(np.moveaxis(IMAGES, -1, 1))
    finally:
        keras.config.set_image_data_format("channels_last")
    np.testing.assert_array_equal(found, IMAGES)


@pytest.mark.parametrize("y", [[2, 0, 1], [[2], [0], [1]], np.eye(3)[[2, 0, 1]]], ids=str)
def test_class_numbers(y):
    found = reading.class_numbers(np.asarray(y), X[:3], 3)
    np.testing.assert_array_equal(found, [2, 0, 1])


def test_all_pictures_of_images_take_data_sets():
    model = small_model(keras.layers.Dense(3), shape=(4, 4, 1))
    labels = np.arange(20) % 3

    def batches():
        return iter([(IMAGES[:13], labels[:13]), (IMAGES[13:], labels[13:])])

    pictures = [
        (visualize.plot_learned_neighbors, [IMAGES], [batches()]),
        (visualize.plot_feature_map, [IMAGES, labels], [batches()]),
        (visualize.plot_prototype_cosines, [IMAGES, labels], [batches()]),
        (
            visualize.plot_subcategories,
            [IMAGES, labels] * 2,
            [batches(), None, batches(), None],
        ),
    ]
    for plot, arrays, data_sets in pictures:
        one, other = plot(model, *arrays), plot(model, *data_sets)
        for first, second in zip(one.axes, other.axes, strict=True):
            assert first.get_xlabel() == second.get_xlabel()
            assert first.get_ylabel() == second.get_ylabel()


DENSE = keras.layers.Dense


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: reading.require_classifier(small_model(DENSE(3), task="regression")),
            "`model` must be a classifier.*'regression'",
        ),
        (lambda: reading.require_images(X, "images"), r"`images` must hold images.*20, 6"),
        (lambda: reading.class_numbers(None, X, 3), "`y` must be given, or come with the"),
        (lambda: reading.class_numbers(np.arange(3), X[:3], 2), "`y` must hold classes 0"),
        (
            lambda: reading.class_numbers(np.zeros(5), X, 3, "labels"),
            r"`labels` must hold one label for each of the 20 examples.*len\(labels\)=5",
        ),
        (lambda: reading.names_of(3, "ab"), "`class_names` must hold 3 names.*2 names"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
