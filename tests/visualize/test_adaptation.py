"""One prediction taken apart: every number that is drawn."""

import keras
import numpy as np
import pytest
from keras import ops
from pictures import check_saved, small_model

import nsl_keras
from nsl_keras import visualize
from nsl_keras.visualize import adaptation

RNG = np.random.default_rng(9)
X = RNG.normal(size=(20, 6)).astype("float32")


def outputs_of(model, example):
    return [
        ops.convert_to_numpy(model(example[None], adapt=adapt))[0]
        for adapt in (False, True)
    ]


def parts_of(figure):
    """The axes of a picture without images, by what is in them."""
    titled = {
        axis.get_title().split(" logit")[0].split(" output")[0]: axis
        for axis in figure.axes
    }
    drawn = [axis for axis in figure.axes if axis.images and not axis.get_title()]
    return {
        **titled,
        "top": figure.axes[0],
        "whole": drawn[0],
        "others": next(
            a for a in figure.axes if any("others" in t.get_text() for t in a.texts)
        ),
        "bar": figure.axes[-1],
    }


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_numbers_of_an_adaptation(task, tmp_path):
    model = small_model(keras.layers.Dense(3), task=task)
    figure = visualize.plot_adaptation(model, X[3], k=4, class_names=["ant", "bee", "cat"])
    check_saved(figure, tmp_path)
    parts = parts_of(figure)
    top, bars, each = parts["top"], parts["attention weight"], parts["change of each"]
    whole, others = parts["whole"], parts["others"]
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
        expected = [
            f"{label}: {names[value.argmax()]}, {100 * value.max():.0f} %"
            for label, value in zip(expected, found.values[0], strict=True)
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
    # One scale, that of the colour bar, for all rows.
    low, high = each.images[0].get_clim()
    assert low == -high < 0
    assert whole.images[0].get_clim() == (low, high)
    largest = max(np.abs(part).max() for part in (changes, rest, total))
    assert high == pytest.approx(largest)
    unit = "logit" if task == "classification" else "output"
    assert parts["bar"].get_ylabel() == f"change of the {unit}"
    weight = 1 - found.weights.sum()
    assert others.texts[0].get_text() == f"8 others, weight {weight:.2f}"


def test_images_of_an_adaptation(tmp_path):
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
    # Of fourteen classes the twelve most probable ones.
    assert titled["change of each logit"].images[0].get_array().shape == (3, 12)


def test_no_effect_is_said():
    model = small_model(keras.layers.Dense(3))
    model.neighborhood.rate.raw_rates[0].assign(1e-9)
    each = parts_of(visualize.plot_adaptation(model, X[3], k=4))["change of each"]
    assert "no effect, none moves by more than" in each.get_title()
    assert {text.get_text() for text in each.texts} == {"0"}
    # Rounding is no colour.
    assert each.images[0].get_clim() == (-0.01, 0.01)


def test_what_is_predicted_is_told():
    model = small_model(keras.layers.Dense(3))
    figure = visualize.plot_adaptation(model, X[3], k=4, class_names=["ant", "bee", "cat"])
    texts = [text.get_text() for axis in figure.axes for text in axis.texts]
    for when, logits in zip(("before", "after"), outputs_of(model, X[3]), strict=True):
        probabilities = softmax(logits)
        name = ["ant", "bee", "cat"][probabilities.argmax()]
        assert f"{when}: {name}, {100 * probabilities.max():.0f} %" in texts


def test_long_names_are_slanted():
    model = small_model(keras.layers.Dense(3))
    angles = [
        {label.get_rotation() for label in figure.axes[0].get_xticklabels()}
        for figure in (
            visualize.plot_adaptation(model, X[3], k=2, class_names=names)
            for names in (["ant", "bee", "cat"], ["anteater", "hippopotamus", "wildcat"])
        )
    ]
    assert angles == [{0.0}, {40.0}]


def test_an_adaptation_of_several_inputs():
    image, more = keras.Input((4, 4, 1)), keras.Input((2,))
    joined = keras.layers.Concatenate()([keras.layers.Flatten()(image), more])
    model = nsl_keras.MetaNeighborhoodModel(
        keras.Model([image, more], keras.layers.Dense(5)(joined)),
        nsl_keras.layers.CosineDense(3),
        dictionary=9,
    )
    inputs = [RNG.random((20, 4, 4, 1)), RNG.random((20, 2))]
    model.build([each.shape for each in inputs])
    one = [each[5] for each in inputs]
    figure = visualize.plot_adaptation(model, one, k=3, images=inputs)
    titled = {axis.get_title(): axis for axis in figure.axes}
    drawn = np.asarray(titled["example"].images[0].get_array())
    np.testing.assert_allclose(drawn, inputs[0][5, :, :, 0], atol=1e-6)
    assert len(titled["nearest image"].child_axes) == 3
    figure = visualize.plot_learned_neighbors(model, inputs, nearest=2)
    assert figure.axes[1].images


def test_an_example_as_a_list_of_numbers():
    model = small_model(keras.layers.Dense(3))
    one, other = (
        parts_of(visualize.plot_adaptation(model, example, k=4))["change of each"]
        for example in (X[3], X[3].tolist())
    )
    np.testing.assert_allclose(
        one.images[0].get_array(), other.images[0].get_array(), atol=1e-6
    )


def test_errors_of_an_adaptation():
    model = small_model(keras.layers.Dense(3))
    with pytest.raises(ValueError, match=r"`k` must be at most `num_neighbors`.*k=13"):
        visualize.plot_adaptation(model, X[0], k=13)
    with pytest.raises(ValueError, match=r"`k` must be a positive integer"):
        visualize.plot_adaptation(model, X[0], k=0)
    with pytest.raises(ValueError, match=r"`class_names` must hold 3 names"):
        visualize.plot_adaptation(model, X[0], class_names="ab")


def test_a_change_without_effect_is_rounded_up():
    model = small_model(keras.layers.Dense(3))
    model.neighborhood.rate.raw_rates[0].assign(2e-4)
    each = parts_of(visualize.plot_adaptation(model, X[3], k=12))["change of each"]
    told = float(each.get_title().rsplit(" ", 1)[1])
    before, after = outputs_of(model, X[3])
    found = model.neighbors(X[3:4], k=12)
    largest = max(np.abs(after - before).max(), np.abs(found.output_changes).max())
    assert largest < told < 2 * largest


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.003355, "0.004"), (0.0095, "0.01"), (0.004, "0.004"), (1e-9, "1e-09")],
)
def test_rounding_up(value, text):
    assert adaptation._rounded_up(value) == text


def test_an_example_is_drawn_on_the_scale_of_the_images():
    images = RNG.normal(size=(20, 4, 4, 1)).astype("float32")
    images[5] = np.abs(images[5])
    model = nsl_keras.MetaNeighborhoodModel(
        keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(5)]),
        nsl_keras.layers.CosineDense(3),
        dictionary=9,
    )
    model.build(images.shape)
    batches = iter([(images, np.zeros(20))])
    figure = visualize.plot_adaptation(model, images[5], k=3, images=batches)
    titled = {axis.get_title(): axis for axis in figure.axes}
    drawn = np.asarray(titled["example"].images[0].get_array())
    expected = (images[5, ..., 0] - images.min()) / np.ptp(images)
    np.testing.assert_allclose(drawn, expected, atol=1e-6)


def test_long_names_have_room(check_inside):
    images = RNG.random((20, 4, 4, 1)).astype("float32")
    model = nsl_keras.MetaNeighborhoodModel(
        keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(5)]),
        nsl_keras.layers.CosineDense(3),
        dictionary=9,
    )
    model.build(images.shape)
    names = ["a rather long class name here", "another such class name", "third"]
    figure = visualize.plot_adaptation(
        model, images[5], k=3, images=images, class_names=names
    )
    check_inside(figure)
    titled = {axis.get_title(): axis for axis in figure.axes}
    inches = titled["change of each logit"].get_window_extent().width / figure.dpi
    assert inches > 1.5
