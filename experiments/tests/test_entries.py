"""Images that attend to entries: all that is drawn."""

import keras
import numpy as np
import pytest
from keras import ops
from pictures import attention_of, drawn, small_model

from experiments.image_classification.pictures import plot_entries

RNG = np.random.default_rng(9)
IMAGES = RNG.random((30, 4, 4, 1)).astype("float32")


@pytest.fixture
def model():
    model = small_model(keras.layers.Dense(3), shape=(4, 4, 1))
    # Some entries are undecided.
    model.dictionary.raw_values.assign(0.05 * model.dictionary.raw_values)
    return model


def test_entries_of_each_predicted_class_and_the_images_that_attend_to_them(model):
    values = ops.convert_to_numpy(model.dictionary.values)
    predicted = model.predict(IMAGES, verbose=0).argmax(axis=1)
    attention, expected = attention_of(model, IMAGES), []
    for kind in np.unique(predicted):
        usage = attention[predicted == kind].mean(axis=0)
        expected.append(next(e for e in np.argsort(-usage) if e not in expected))
    decided = values[expected].max(axis=1) >= 0.5
    assert 0 < decided.sum() < len(expected)
    names = ["ant", "bee", "cat"]
    figure = plot_entries(model, IMAGES, names, nearest=5)
    assert len(figure.axes) == 6 * len(expected)
    for row, entry in enumerate(expected):
        bars, *pictures = figure.axes[6 * row : 6 * row + 6]
        assert bars.get_ylabel() == f"entry\n{entry}"
        heights = [bar.get_height() for bar in bars.patches]
        np.testing.assert_allclose(heights, values[entry], rtol=1e-5)
        text = f"{names[values[entry].argmax()]}, {100 * values[entry].max():.0f} %"
        assert bars.get_xlabel() == text + ("" if decided[row] else ", undecided")
        nearest = np.argsort(-attention[:, entry])[:5]
        weights = [picture.get_xlabel() for picture in pictures]
        assert weights == [f"{weight:.2g}" for weight in attention[nearest, entry]]
        for picture, index in zip(pictures, nearest, strict=True):
            np.testing.assert_array_equal(drawn(picture), IMAGES[index, :, :, 0])
