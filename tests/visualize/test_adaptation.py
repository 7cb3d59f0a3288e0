"""One prediction taken apart: every number that is drawn."""

import keras
import numpy as np
import pytest
from keras import ops
from pictures import drawn, small_model, written

from nsl_keras import visualize

RNG = np.random.default_rng(9)
X = RNG.normal(size=(20, 6)).astype("float32")
NAMES = ["ant", "bee", "cat"]


def outputs_of(model, example):
    return [
        ops.convert_to_numpy(model(example[None], adapt=adapt))[0]
        for adapt in (False, True)
    ]


def parts_of(figure):
    return {axis.get_label(): axis for axis in figure.axes}


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_numbers(task, tmp_path):
    model = small_model(keras.layers.Dense(3), task=task)
    figure = visualize.plot_adaptation(model, X[3], k=4, class_names=NAMES)
    figure.savefig(tmp_path / "figure.png")
    bars, weights, matrix = (parts_of(figure)[n] for n in ("outputs", "weights", "changes"))
    before, after = outputs_of(model, X[3])
    found = model.neighbors(X[3:4], k=4, by="effect")

    changes = np.asarray(found.output_changes[0])
    others = after - before - changes.sum(axis=0)
    expected = np.stack([*changes, others, after - before])
    np.testing.assert_allclose(drawn(matrix), expected, atol=1e-5)
    np.testing.assert_allclose(written(matrix), expected.ravel(), atol=0.006)
    largest = np.abs(expected).max()
    assert matrix.images[0].get_clim() == pytest.approx((-largest, largest))
    assert [label.get_text() for label in matrix.get_xticklabels()] == NAMES

    widths = [bar.get_width() for bar in weights.patches]
    np.testing.assert_allclose(widths[:-1], found.weights[0], rtol=1e-5)
    np.testing.assert_allclose(sum(widths), 1, atol=1e-5)

    rows = [f"entry {index}" for index in found.indices[0]]
    legend = ["before", "after"]
    shown = (before, after)
    if task == "classification":
        shown = [softmax(before), softmax(after)]
        kinds = [f"{NAMES[v.argmax()]}, {100 * v.max():.0f} %" for v in found.values[0]]
        rows = [f"{row}: {kind}" for row, kind in zip(rows, kinds, strict=True)]
        tops = [f"{NAMES[p.argmax()]}, {100 * p.max():.0f} %" for p in shown]
        legend = [f"{when}: {top}" for when, top in zip(legend, tops, strict=True)]
    labels = [label.get_text() for label in weights.get_yticklabels()]
    assert labels == [*rows, "8 others", "sum"]
    assert [text.get_text() for text in bars.get_legend().get_texts()] == legend
    heights = np.reshape([bar.get_height() for bar in bars.patches], (2, 3))
    np.testing.assert_allclose(heights, shown, atol=1e-5)
    unit = "logit" if task == "classification" else "output"
    assert matrix.get_title() == f"change of each {unit}"


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_no_effect_is_said(task):
    model = small_model(keras.layers.Dense(3), task=task)
    model.neighborhood.learning_rate.weights[0].assign(1e-9)
    matrix = parts_of(visualize.plot_adaptation(model, X[3], k=4))["changes"]
    assert matrix.get_title().endswith(": no effect")
    assert not np.any(written(matrix))
    # Rounding is no color.
    least = 0.01
    if task == "regression":
        least *= np.abs(outputs_of(model, X[3])[0]).max()
    assert matrix.images[0].get_clim() == pytest.approx((-least, least))


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
