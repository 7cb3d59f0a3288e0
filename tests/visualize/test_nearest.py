"""Images that attend to entries, and images found for queries: all that is drawn."""

import keras
import numpy as np
import pytest
from keras import ops
from matplotlib.colors import to_hex
from pictures import attention_of, drawn, small_model

from nsl_keras import visualize
from nsl_keras.visualize.figures import BLUE, ORANGE

RNG = np.random.default_rng(9)
IMAGES = RNG.random((30, 4, 4, 1)).astype("float32")
LABELS = RNG.integers(0, 4, size=30)
QUERIES = RNG.random((11, 4, 4, 1)).astype("float32")
QUERY_LABELS = RNG.integers(0, 4, size=11)


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
    figure = visualize.plot_learned_neighbors(
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
    figure = visualize.plot_learned_neighbors(model, IMAGES, nearest=2)
    labels = [axis.get_ylabel() for axis in figure.axes[::3]]
    assert labels == [f"entry\n{entry}" for entry in expected]


def plain_model():
    return keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Flatten()])


@pytest.mark.parametrize("described_by", ["features", "attention to 12 entries"])
def test_images_frames_and_accuracy(described_by):
    if described_by == "features":
        model = plain_model()
        one, other = QUERIES.reshape(11, 16), IMAGES.reshape(30, 16)
    else:
        model = small_model(keras.layers.Dense(2), shape=(4, 4, 1))
        one, other = attention_of(model, QUERIES), attention_of(model, IMAGES)
    figure = visualize.plot_subcategories(
        model, IMAGES, LABELS, QUERIES, QUERY_LABELS, nearest=4, rows=(2, 7, 0)
    )
    one, other = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (one, other))
    found = np.argsort(-one @ other.T, axis=1)[:, :4]
    for position, row in enumerate([2, 7, 0]):
        query, *others = figure.axes[5 * position : 5 * position + 5]
        np.testing.assert_array_equal(drawn(query), QUERIES[row, :, :, 0])
        assert query.get_xlabel() == str(QUERY_LABELS[row])
        for axis, index in zip(others, found[row], strict=True):
            np.testing.assert_array_equal(drawn(axis), IMAGES[index, :, :, 0])
            is_same = LABELS[index] == QUERY_LABELS[row]
            color = to_hex(axis.spines["top"].get_edgecolor()).upper()
            assert color == (BLUE if is_same else ORANGE)
            assert axis.get_xlabel() == str(LABELS[index])
    votes = []
    for labels in LABELS[found]:
        kinds, counts = np.unique(labels, return_counts=True)
        best = kinds[counts == counts.max()]
        votes.append(next(label for label in labels if label in best))
    share = 100 * np.mean(np.asarray(votes) == QUERY_LABELS)
    title = figure.get_suptitle()
    assert title.startswith(f"By {described_by}: {share:.1f} % of 11 queries")


def test_the_first_query_of_each_label_is_drawn_by_default():
    labels = np.array([2, 2, 0, 1, 0])
    figure = visualize.plot_subcategories(
        *(plain_model(), IMAGES, LABELS, QUERIES[:5], labels, 2),
        class_names=np.array(list("abcdef")),
    )
    assert [axis.get_xlabel() for axis in figure.axes[::3]] == ["c", "a", "b"]
