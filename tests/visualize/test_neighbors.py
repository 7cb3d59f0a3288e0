"""Predictions beside the training images compared with, and one prediction taken apart."""

import keras
import numpy as np
import pytest
from helpers import as_numpy
from pictures import drawn, small_model, written

from nsl_keras import visualize

pytestmark = pytest.mark.usefixtures("eager")
RNG = np.random.default_rng(9)
IMAGES = RNG.random((30, 4, 4, 1)).astype("float32")
LABELS = RNG.integers(0, 3, size=30)
X = RNG.normal(size=(20, 6)).astype("float32")
NAMES = ["ant", "bee", "cat"]


def similarities_of(model, x):
    """The largest cosine of each query with the entries that an image stands for.

    It is the nearest image of the entry's own class.
    """
    keys = model.dictionary.keys
    parts = map(np.asarray, (model.features(x), model.features(IMAGES), keys))
    units = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in parts]
    queries, examples = (each @ units[2].T for each in units[:2])
    classes = np.asarray(model.dictionary.values).argmax(axis=1)
    nearest = np.where(LABELS[:, None] == classes, examples, -np.inf).argmax(axis=0)
    found = np.full((len(x), len(IMAGES)), -np.inf)
    for entry, example in enumerate(nearest):
        found[:, example] = np.maximum(found[:, example], queries[:, entry])
    return found


def test_images_labels_and_similarities():
    model = small_model(keras.layers.Dense(3), shape=(4, 4, 1))
    similarities = similarities_of(model, IMAGES[:4])
    outputs = np.asarray(model(IMAGES[:4], adapt=False)), model.predict(IMAGES[:4])
    before, after = ([NAMES[each] for each in row.argmax(axis=1)] for row in outputs)
    batches, labels = iter([IMAGES[:2], IMAGES[2:4]]), np.eye(3)[LABELS]
    options = {"k": 3, "class_names": NAMES}
    figure = visualize.plot_neighbors(model, batches, IMAGES, labels, **options)
    for row, (query, *neighbors) in enumerate(np.reshape(figure.axes, (4, 4))):
        np.testing.assert_array_equal(drawn(query), IMAGES[row, :, :, 0])
        expected = np.argsort(-similarities[row])[:3]
        for axis, index in zip(neighbors, expected, strict=True):
            np.testing.assert_array_equal(drawn(axis), IMAGES[index, :, :, 0])
            text = f"{NAMES[LABELS[index]]}\n{similarities[row, index]:.2f}"
            assert axis.get_xlabel() == text
        lines = [after[row], f"before: {before[row]}"]
        assert query.get_xlabel().split("\n") == lines[: 1 + (before[row] != after[row])]
    assert before != after


def test_predictions_that_hold():
    """Without a change of the class, it is written once."""
    model = small_model(keras.layers.Dense(3), shape=(4, 4, 1))
    for rate in model.neighborhood.learning_rate.weights:
        rate.assign(0.0)
    found = model.predict(IMAGES[:2]).argmax(axis=1)
    truths = [found[0], (found[1] + 1) % 3]
    figure = visualize.plot_neighbors(model, IMAGES[:2], IMAGES, k=1, y=truths)
    right, _, wrong, _ = figure.axes
    assert right.get_xlabel() == f"{found[0]}\ntrue: {found[0]}"
    assert wrong.get_xlabel() == f"{found[1]}\nwrong, true: {truths[1]}"


def outputs_of(model, example):
    return [as_numpy(model(example[None], adapt=adapt))[0] for adapt in (False, True)]


def parts_of(figure):
    return {axis.get_label(): axis for axis in figure.axes}


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


def test_adaptation_in_numbers(tmp_path):
    model = small_model(keras.layers.Dense(3))
    figure = visualize.plot_adaptation(model, X[3], k=4, class_names=NAMES)
    figure.savefig(tmp_path / "figure.png")
    bars, matrix = (parts_of(figure)[name] for name in ("classes", "changes"))
    before, after = outputs_of(model, X[3])
    found = model.neighbors(X[3:4], k=4, by="effect")

    changes = np.asarray(found.output_changes[0])
    others = after - before - changes.sum(axis=0)
    expected = np.stack([*changes, others, after - before])
    np.testing.assert_allclose(drawn(matrix), expected, atol=1e-5)
    np.testing.assert_allclose(written(matrix), expected.ravel(), atol=0.0006)
    largest = np.abs(expected).max()
    assert matrix.images[0].get_clim() == pytest.approx((-largest, largest))
    assert [label.get_text() for label in matrix.get_xticklabels()] == NAMES

    rows = ["all other entries", "sum"]
    for entry in reversed(range(4)):
        kind = NAMES[found.values[0][entry].argmax()]
        share = f"attention {found.weights[0][entry]:.1%}"
        rows = [f"entry {found.indices[0][entry]}: {kind}, {share}", *rows]
    assert [label.get_text() for label in matrix.get_yticklabels()] == rows
    shown = [softmax(before), softmax(after)]
    tops = [f"{NAMES[p.argmax()]}, {p.max():.0%}" for p in shown]
    legend = [text.get_text() for text in bars.get_legend().get_texts()]
    assert legend == [f"before: {tops[0]}", f"after: {tops[1]}"]
    heights = np.reshape([bar.get_height() for bar in bars.patches], (2, 3))
    np.testing.assert_allclose(heights, shown, atol=1e-5)


def test_no_effect_is_said():
    model = small_model(keras.layers.Dense(3))
    model.neighborhood.learning_rate.weights[0].assign(1e-9)
    matrix = parts_of(visualize.plot_adaptation(model, X[3], k=4))["changes"]
    assert matrix.get_title().endswith(": no effect")
    assert not np.any(written(matrix))
    assert matrix.images[0].get_clim() == (-0.01, 0.01)  # Rounding is no color.


def test_images_and_the_most_probable_of_many_classes():
    # Standardized: the example is drawn on the scale of all images.
    images = RNG.normal(size=(20, 4, 4, 1)).astype("float32")
    images[5] = np.abs(images[5])
    model = small_model(keras.layers.Dense(14), shape=(4, 4, 1))
    figure = visualize.plot_adaptation(model, images[5], k=3, images=iter([images]))
    parts = parts_of(figure)
    expected = (images[..., 0] - images.min()) / np.ptp(images)
    np.testing.assert_allclose(drawn(parts["example"]), expected[5], atol=1e-6)
    entries = model.neighbors(images[5:6], k=3, by="effect").indices[0]
    nearest = model.nearest_examples(images)[entries]
    insets = parts["nearest"].child_axes
    for inset, index in zip(insets, nearest, strict=True):
        np.testing.assert_allclose(drawn(inset), expected[index], atol=1e-6)
    matrix = parts["changes"]
    assert drawn(matrix).shape == (5, 12)
    probabilities = np.max([softmax(each) for each in outputs_of(model, images[5])], axis=0)
    shown = {int(label.get_text()) for label in matrix.get_xticklabels()}
    assert shown == set(np.argsort(-probabilities)[:12].tolist())
