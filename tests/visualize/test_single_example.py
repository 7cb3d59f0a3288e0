"""One prediction taken apart: every number in the picture."""

import keras
import numpy as np
import pytest
from keras import ops
from pictures import check_saved, small_model

import nsl_keras
from nsl_keras import visualize

RNG = np.random.default_rng(7)
X = RNG.normal(size=(20, 6)).astype("float32")


def outputs_of(model, example):
    return [
        ops.convert_to_numpy(model(example[None], adapt=adapt))[0]
        for adapt in (False, True)
    ]


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_numbers(task, tmp_path):
    model = small_model(keras.layers.Dense(3), task=task)
    figure = visualize.plot_adaptation(model, X[3], k=4, class_names=["ant", "bee", "cat"])
    check_saved(figure, tmp_path)
    top, bars, each, whole, others = figure.axes
    before, after = outputs_of(model, X[3])
    found = model.neighbors(X[3:4], k=4)
    drawn = np.reshape([bar.get_height() for bar in top.patches], (2, 3))
    shown = (before, after)
    if task == "classification":
        shown = (softmax(before), softmax(after))
    np.testing.assert_allclose(drawn, shown, atol=1e-5)
    assert top.get_ylabel() == ("probability" if task == "classification" else "output")
    widths = [bar.get_width() for bar in bars.patches]
    np.testing.assert_allclose(widths, found.weights[0], rtol=1e-5)
    names = ["ant", "bee", "cat"]
    expected = [f"entry {index}" for index in found.indices[0]]
    if task == "classification":
        kinds = found.values[0].argmax(axis=1)
        expected = [
            f"{label}: {names[kind]}" for label, kind in zip(expected, kinds, strict=True)
        ]
    assert [label.get_text() for label in bars.get_yticklabels()] == expected
    changes = np.asarray(each.images[0].get_array())
    np.testing.assert_allclose(changes, found.output_changes[0], atol=1e-6)
    rest, total = np.asarray(whole.images[0].get_array())
    np.testing.assert_allclose(total, after - before, atol=1e-6)
    np.testing.assert_allclose(rest + changes.sum(axis=0), after - before, atol=1e-5)
    np.testing.assert_allclose(
        [float(text.get_text()) for text in each.texts], changes.reshape(-1), atol=0.006
    )
    low, high = each.images[0].get_clim()
    assert low == -high < 0
    weight = 1 - found.weights.sum()
    assert others.texts[0].get_text() == f"8 others, weight {weight:.2f}"


def test_images(tmp_path):
    images = RNG.random((20, 4, 4, 3)).astype("float32")
    model = nsl_keras.MetaNeighborhoodModel(
        keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(5)]),
        nsl_keras.layers.CosineDense(14),
        dictionary=9,
    )
    model.build(images.shape)
    model.dictionary.keys.assign(RNG.normal(size=(9, 5)))
    figure = visualize.plot_adaptation(model, images[5], k=3, images=images)
    check_saved(figure, tmp_path)
    titled = {axis.get_title(): axis for axis in figure.axes}
    drawn = np.asarray(titled["example"].images[0].get_array())
    np.testing.assert_allclose(drawn, images[5])
    insets = titled["nearest image"].child_axes
    assert len(insets) == 3
    attention = ops.convert_to_numpy(model.dictionary.attention(model.features(images)))
    found = model.neighbors(images[5:6], k=3)
    for inset, entry in zip(insets, found.indices[0], strict=True):
        drawn = np.asarray(inset.images[0].get_array())
        np.testing.assert_allclose(drawn, images[attention[:, entry].argmax()])
    # Fourteen classes leave no room for numbers.
    assert not titled["change of each logit"].texts


def test_errors():
    model = small_model(keras.layers.Dense(3))
    with pytest.raises(ValueError, match=r"`k` must be at most `num_neighbors`.*k=13"):
        visualize.plot_adaptation(model, X[0], k=13)
    with pytest.raises(ValueError, match=r"`k` must be a positive integer"):
        visualize.plot_adaptation(model, X[0], k=0)
    with pytest.raises(ValueError, match=r"`class_names` must hold 3 names"):
        visualize.plot_adaptation(model, X[0], class_names="ab")
