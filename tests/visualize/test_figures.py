"""What all figures share: images, matrices, data of any form, and errors."""

import sys

import keras
import numpy as np
import pytest
from helpers import refusing
from pictures import drawn, small_model

import nsl_keras
from nsl_keras import visualize
from nsl_keras.visualize import figures

RNG = np.random.default_rng(9)
IMAGES = RNG.random((20, 4, 4, 1)).astype("float32")
X = RNG.normal(size=(20, 6)).astype("float32")


def test_error_without_matplotlib(monkeypatch):
    # An entry of None makes the import fail as if nothing were installed.
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        figures.new_figure(2, 1)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_images_of_any_number_of_channels(channels):
    image = np.random.default_rng(0).random((5, 6, channels))
    axis = figures.new_figure(2, 1).subplots()
    figures.draw_image(axis, image, (0, 1))
    expected = image if channels in (3, 4) else image.mean(axis=-1)
    np.testing.assert_allclose(drawn(axis), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("stacks", "values"),
    [
        ([[0.2, 0.9]], (0, 1)),
        ([[0, 16.0]], (0, 16)),
        ([[0, 240]], (0, 255)),
        ([np.full(2, 16, "uint8")], (0, 255)),  # Dark bytes.
        ([[-1.0, 1.0]], (-1, 1)),
        ([[-2.0, -2.0]], (-2, -1)),
        ([[0.5, 2.0], [-3.0, 1.0]], (-3, 2)),
    ],
    ids=str,
)
def test_values_that_are_black_and_white(stacks, values):
    assert figures.display_range(*map(np.array, stacks)) == pytest.approx(values)


def test_images_among_several_inputs():
    inputs = {"vector": X, "image": IMAGES}
    assert figures.images_in(inputs) is IMAGES
    assert figures.images_in([X]) is None
    keras.config.set_image_data_format("channels_first")
    found = figures.images_in(np.moveaxis(IMAGES, -1, 1))
    np.testing.assert_array_equal(found, IMAGES)


def picture(name, *data, model=None, **options):
    """A call that draws, later."""

    def draw():
        shape = np.shape(data[0])[1:] if data else ()
        of = model() if model else small_model(keras.layers.Dense(3), shape=shape or (6,))
        return getattr(visualize, f"plot_{name}")(of, *data, **options)

    return draw


def plain_model():
    return keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Conv2D(2, 3)])


def dynamic_model():
    layer = nsl_keras.layers.NeuralSimilarityConv2D(2, 3, predictor="sphere", name="seen")
    return keras.Sequential([keras.Input((4, 4, 1)), layer])


test_errors = refusing(
    (lambda: figures.require_images(X, "images"), r"`images` must hold images.*20, 6"),
    (lambda: figures.names_of(3, "ab"), "`class_names` must hold 3 names.*2 names"),
    (picture("adaptation", X[0], k=13), "`k` must be at most the number of.*k=13"),
    (picture("similarities", model=plain_model), "`model` must have static .*neither"),
    (
        picture("dynamic_similarity", IMAGES[0], "other", model=dynamic_model),
        "`layer` must be one of None, 'seen'.*layer='other'",
    ),
    (
        picture("dynamic_similarity", IMAGES[0], model=plain_model),
        "`model` must be a model with a dynamic",
    ),
)
