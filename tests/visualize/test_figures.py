"""What all figures share: images, matrices, data of any form, and errors."""

import sys

import keras
import numpy as np
import pytest
from helpers import refusing, stacked
from pictures import drawn, small_model

import nsl_keras
from nsl_keras import visualize
from nsl_keras.visualize import figures

pytestmark = pytest.mark.usefixtures("eager")
RNG = np.random.default_rng(9)
IMAGES = RNG.random((20, 4, 4, 1)).astype("float32")
X = RNG.normal(size=(20, 6)).astype("float32")


def test_error_without_matplotlib(monkeypatch):
    # An entry of None makes the import fail as if nothing were installed.
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        figures.new_figure(2, 1)


def test_images_of_any_number_of_channels():
    for channels in (3, 7):
        image = RNG.random((5, 6, channels))
        axis = figures.new_figure(2, 1).subplots()
        figures.draw_image(axis, image, (0, 1))
        expected = image if channels == 3 else image.mean(axis=-1)
        np.testing.assert_allclose(drawn(axis), expected, atol=1e-6)


def test_values_that_are_black_and_white():
    for stacks, values in (
        ([[0.2, 0.9]], (0, 1)),
        ([np.full(2, 16, "uint8")], (0, 255)),  # Dark bytes.
        ([[0.5, 2.0], [-3.0, 1.0]], (-3, 2)),
    ):
        assert figures.display_range(*map(np.array, stacks)) == pytest.approx(values)


def test_images_among_several_inputs():
    plain = keras.Sequential([keras.layers.Dense(2)])
    assert figures.images_in(plain, {"vector": X, "image": IMAGES}) is IMAGES
    assert figures.images_in(plain, [X]) is None
    keras.config.set_image_data_format("channels_first")
    found = figures.images_in(plain, np.moveaxis(IMAGES, -1, 1))
    np.testing.assert_array_equal(found, IMAGES)
    last = keras.Sequential([keras.layers.Conv2D(2, 1, data_format="channels_last")])
    assert figures.images_in(last, IMAGES) is IMAGES


def test_pictures_of_networks_with_channels_first():
    """Where the channels are, the layers say, and not Keras's setting."""
    options = {"padding": "same", "data_format": "channels_first"}
    layer = nsl_keras.layers.NeuralSimilarityConv2D(2, 3, predictor="sphere", **options)
    images = RNG.random((4, 3, 8, 7)).astype("float32")
    expected = np.moveaxis(images, 1, -1)
    pooling = keras.layers.GlobalAveragePooling2D(data_format="channels_first")
    backbone = stacked(images.shape[1:], layer, pooling)
    model = nsl_keras.MetaNeighborhoodModel(backbone, keras.layers.Dense(3), 4)
    model.build(images.shape)
    panels = visualize.plot_neighbors(model, images[:1], images, k=2).axes
    np.testing.assert_allclose(drawn(panels[0]), expected[0], atol=1e-6)
    assert drawn(panels[1]).shape == (8, 7, 3)
    figure = visualize.plot_adaptation(model, images[1], k=2, images=images)
    np.testing.assert_allclose(drawn(figure.axes[0]), expected[1], atol=1e-6)
    seen, distances = visualize.plot_dynamic_similarity(model, images[2]).axes[:2]
    np.testing.assert_allclose(drawn(seen), expected[2], atol=1e-6)
    assert drawn(distances).shape == (8, 7)


def picture(name, *data, model=None, **options):
    """A call that draws, later."""

    def draw():
        shape = IMAGES.shape[1:] if name == "neighbors" else X.shape[1:]
        of = model() if model else small_model(keras.layers.Dense(3), shape=shape)
        return getattr(visualize, f"plot_{name}")(of, *data, **options)

    return draw


def regression():
    return small_model(keras.layers.Dense(3), "regression")


def plain_model():
    return stacked((4, 4, 1), keras.layers.Conv2D(2, 3))


def dynamic_model():
    layer = nsl_keras.layers.NeuralSimilarityConv2D(2, 3, predictor="sphere", name="seen")
    return stacked((4, 4, 1), layer)


test_errors = refusing(
    (lambda: figures.require_images(plain_model(), X, "x"), r"`x` must be images.*20, 6"),
    (picture("adaptation", X[0], class_names="ab"), "`class_names` must be 3 n.*='ab'"),
    (picture("adaptation", X[0], k=13), "`k` must be at most the number of.*k=13"),
    (picture("adaptation", X[0], model=regression), "`MetaNeighborhoodModel` of classes"),
    (picture("adaptation", X[:2]), r"Expected shape \(None, 6\), but .*\(1, 2, 6\)"),
    (picture("similarities", model=plain_model), "`model` must be .*static .*='sequential"),
    (picture("neighbors", IMAGES, IMAGES, model=plain_model), "`model` must be a `MetaN"),
    (picture("neighbors", IMAGES, IMAGES[:2], k=3), "`k` must be at most the number of ex"),
    (picture("neighbors", IMAGES, IMAGES, np.zeros(5)), r"must be 20, .*len\(labels\)=5"),
    (
        picture("dynamic_similarity", IMAGES[0], "other", model=dynamic_model),
        "`layer` must be one of None, 'seen'.*layer='other'",
    ),
    (
        picture("dynamic_similarity", IMAGES[0], model=plain_model),
        "`model` must be a model with a dynamic",
    ),
)
