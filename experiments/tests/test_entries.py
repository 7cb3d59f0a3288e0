"""Images that attend to entries: all that is drawn."""

import keras
import numpy as np
import pytest
from keras import ops
from pictures import attention_of, drawn, small_model

from experiments.image_classification.entries import plot_entries

RNG = np.random.default_rng(9)
IMAGES = RNG.random((30, 4, 4, 1)).astype("float32")


@pytest.fixture
def model():
    model = small_model(keras.layers.Dense(3), shape=(4, 4, 1))
    # Some entries are undecided.
    model.dictionary.raw_values.assign(0.1 * model.dictionary.raw_values)
    return model


def test_values_and_nearest_images(model):
    values = ops.convert_to_numpy(model.dictionary.values)
    attention = attention_of(model, IMAGES)
    undecided, decided = values.max(axis=1).argmin(), values.max(axis=1).argmax()
    assert values[undecided].max() < 0.5 < values[decided].max()
    chosen = [undecided, decided]
    figure = plot_entries(
        model, IMAGES, chosen, nearest=5, class_names=["ant", "bee", "cat"]
    )
    assert len(figure.axes) == 2 * (1 + 5)
    for row, entry in enumerate(chosen):
        bars, *pictures = figure.axes[6 * row : 6 * row + 6]
        assert bars.get_ylabel() == f"entry\n{entry}"
        heights = [bar.get_height() for bar in bars.patches]
        np.testing.assert_allclose(heights, values[entry], rtol=1e-5)
        name = ["ant", "bee", "cat"][values[entry].argmax()]
        text = f"{name}, {100 * values[entry].max():.0f} %"
        assert bars.get_xlabel() == text + ("" if entry == decided else ", undecided")
        nearest = np.argsort(-attention[:, entry])[:5]
        weights = [picture.get_xlabel() for picture in pictures]
        assert weights == [f"{weight:.2g}" for weight in attention[nearest, entry]]
        for picture, index in zip(pictures, nearest, strict=True):
            np.testing.assert_array_equal(drawn(picture), IMAGES[index, :, :, 0])


def test_entries_that_the_images_of_each_predicted_class_attend_to(model):
    predicted = model.predict(IMAGES, verbose=0).argmax(axis=1)
    attention = attention_of(model, IMAGES)
    expected = []
    for kind in np.unique(predicted):
        usage = attention[predicted == kind].mean(axis=0)
        expected.append(next(e for e in np.argsort(-usage) if e not in expected))
    batches = iter([IMAGES[:13], IMAGES[13:]])
    figure = plot_entries(model, batches, nearest=2)
    labels = [axis.get_ylabel() for axis in figure.axes[::3]]
    assert labels == [f"entry\n{entry}" for entry in expected]
