"""Dictionary entries with the images that look at them: every number that is drawn."""

import keras
import numpy as np
import pytest
from keras import ops
from pictures import check_saved

import nsl_keras
from nsl_keras import visualize

RNG = np.random.default_rng(9)


CLASSES = 3
PICTURES = RNG.random((20, 8, 8, 1)).astype("float32")


@pytest.fixture
def classifier():
    model = nsl_keras.MetaNeighborhoodModel(
        nsl_keras.backbones.convnet4((8, 8, 1), (2, 3, 4, 5)),
        nsl_keras.layers.CosineDense(CLASSES),
        dictionary=12,
    )
    model.build(PICTURES.shape)
    dictionary = model.dictionary
    dictionary.value_logits.assign(RNG.normal(size=(12, CLASSES)))
    return model


def test_learned_neighbors(classifier, tmp_path):
    figure = visualize.plot_learned_neighbors(classifier, PICTURES, [4, 0], nearest=5)
    check_saved(figure, tmp_path)
    assert len(figure.axes) == 2 * (1 + 5)
    dictionary = classifier.dictionary
    values = ops.convert_to_numpy(dictionary.values)
    features = classifier.features(ops.convert_to_tensor(PICTURES), training=False)
    attention = ops.convert_to_numpy(dictionary.attention(features))
    for row, entry in enumerate([4, 0]):
        bars, *pictures = figure.axes[6 * row : 6 * row + 6]
        assert bars.get_ylabel() == f"entry\n{entry}"
        heights = [bar.get_height() for bar in bars.patches]
        np.testing.assert_allclose(heights, values[entry], rtol=1e-5)
        (label,) = bars.get_xticklabels()
        assert label.get_text() == str(values[entry].argmax())
        (text,) = bars.texts
        top = values[entry].max()
        undecided = ", undecided" if top < 0.5 else ""
        assert text.get_text() == f"{100 * top:.0f} %{undecided}"
        nearest = np.argsort(-attention[:, entry])[:5]
        weights = [picture.get_xlabel() for picture in pictures]
        assert weights == [f"{weight:.2g}" for weight in attention[nearest, entry]]
        for picture, index in zip(pictures, nearest, strict=True):
            drawn = np.asarray(picture.images[0].get_array())
            np.testing.assert_array_equal(drawn, PICTURES[index, :, :, 0])


def test_learned_neighbors_take_what_the_images_of_a_class_look_at(classifier):
    dictionary = classifier.dictionary
    features = ops.convert_to_numpy(classifier.features(PICTURES, training=False))
    # All values name class 2; keys at images of three kinds attract them.
    dictionary.assign(values=np.tile([0.1, 0.1, 0.8], (12, 1)))
    predicted = ops.convert_to_numpy(classifier(PICTURES, training=False)).argmax(axis=1)
    attention = ops.convert_to_numpy(dictionary.attention(features))
    expected = []
    for kind in np.unique(predicted):
        usage = attention[predicted == kind].mean(axis=0)
        expected.append(next(e for e in np.argsort(-usage) if e not in expected))
    figure = visualize.plot_learned_neighbors(
        classifier, PICTURES, nearest=2, class_names="abc"
    )
    drawn = [axis.get_ylabel() for axis in figure.axes[::3]]
    assert drawn == [f"entry\n{entry}" for entry in expected]


def test_undecided_entries_are_marked(classifier):
    values = np.tile([0.4, 0.3, 0.3], (12, 1))
    values[1] = [0.0, 0.05, 0.95]
    classifier.dictionary.assign(values=values)
    figure = visualize.plot_learned_neighbors(classifier, PICTURES, [0, 1], nearest=1)
    texts = [axis.texts[0].get_text() for axis in figure.axes[::2]]
    assert texts == ["40 %, undecided", "95 %"]


def test_grey_images_as_they_are_or_inverted(classifier):
    maps = [
        visualize.plot_learned_neighbors(
            classifier, PICTURES, [0], nearest=1, invert=invert
        )
        .axes[1]
        .images[0]
        .get_cmap()(1.0)[0]
        for invert in (False, True)
    ]
    assert maps == [1.0, 0.0]  # The brightest pixel is white, or black.


def test_images_from_a_data_set(classifier):
    expected = visualize.plot_learned_neighbors(classifier, PICTURES, nearest=2)
    batches = [(PICTURES[:13], np.zeros(13)), (PICTURES[13:], np.zeros(7))]
    found = visualize.plot_learned_neighbors(classifier, iter(batches), nearest=2)
    for one, other in zip(found.axes, expected.axes, strict=True):
        assert one.get_xlabel() == other.get_xlabel()
        assert one.get_ylabel() == other.get_ylabel()


def test_error_without_images(classifier):
    with pytest.raises(ValueError, match=r"`images` must hold images.*\(20, 64\)"):
        visualize.plot_learned_neighbors(classifier, PICTURES.reshape(20, 64))


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
    standardized = (images / 127.5 - 1).astype("float32")
    figure = visualize.plot_learned_neighbors(model, standardized, [1], nearest=7)
    drawn = np.asarray(figure.axes[1].images[0].get_array())
    whole = (standardized - standardized.min()) / np.ptp(standardized)
    assert any(np.allclose(drawn, image, atol=1e-6) for image in whole)
    figure = visualize.plot_learned_neighbors(model, 0 * standardized - 1, [1], nearest=7)
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
def test_errors_of_learned_neighbors(options, message, classifier):
    with pytest.raises(ValueError, match=message):
        visualize.plot_learned_neighbors(classifier, PICTURES, **options)


def test_error_of_a_regression():
    regression = nsl_keras.MetaNeighborhoodModel(
        None, keras.layers.Dense(2), dictionary=4, task="regression"
    )
    with pytest.raises(ValueError, match=r"`model` must be a classifier.*'regression'"):
        visualize.plot_learned_neighbors(regression, PICTURES)


@pytest.mark.parametrize("nearest", [1, 2, 3, 6])
def test_the_heading_has_room(nearest, classifier):
    figure = visualize.plot_learned_neighbors(classifier, PICTURES, [0], nearest=nearest)
    figure.canvas.draw()
    (heading,) = figure.axes[1].texts
    assert heading.get_window_extent().xmax < figure.bbox.xmax
    # Beside the heading of the bars.
    first = figure.axes[0].title.get_window_extent()
    assert first.xmax < heading.get_window_extent().xmin
