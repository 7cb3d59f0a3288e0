"""Cosines to the true prototype: the points drawn, for both kinds of head."""

import keras
import numpy as np
import pytest
from keras import ops
from pictures import check_saved, offsets, small_model

import nsl_keras
from nsl_keras import visualize

RNG = np.random.default_rng(5)
X = RNG.normal(size=(30, 6)).astype("float32")
Y = RNG.integers(0, 3, size=30)


@pytest.mark.parametrize(
    "make_head",
    [lambda: nsl_keras.layers.CosineDense(3), lambda: keras.layers.Dense(3)],
    ids=["cosine", "dense"],
)
def test_points(make_head, tmp_path):
    model = small_model(make_head())
    figure = visualize.plot_prototype_cosines(model, X, Y)
    check_saved(figure, tmp_path)
    z = ops.convert_to_numpy(model.features(ops.convert_to_tensor(X)))
    kernel = ops.convert_to_numpy(model.head.kernel.value)
    adapted = ops.convert_to_numpy(model.neighborhood.adapted_weights(z)[0])
    expected = []
    for row, label in enumerate(Y):
        expected.append(
            [
                z[row] @ column / np.linalg.norm(z[row]) / np.linalg.norm(column)
                for column in (kernel[:, label], adapted[row, :, label])
            ]
        )
    expected = np.asarray(expected)
    above = expected[:, 1] > expected[:, 0]
    assert 0 < above.sum() < len(Y)
    rising, falling = figure.axes[0].collections
    np.testing.assert_allclose(offsets(rising), expected[above], atol=1e-5)
    np.testing.assert_allclose(offsets(falling), expected[~above], atol=1e-5)
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts[0] == f"towards the example: {100 * above.mean():.1f} %"
    lowest, _ = figure.axes[0].get_xlim()
    assert lowest < expected.min()


def test_a_rate_of_almost_zero_leaves_the_points_on_the_diagonal():
    model = small_model(nsl_keras.layers.CosineDense(3))
    model.neighborhood.rate.raw_rates[0].assign(1e-9)
    figure = visualize.plot_prototype_cosines(model, X, Y)
    places = np.concatenate([offsets(drawn) for drawn in figure.axes[0].collections])
    np.testing.assert_allclose(places[:, 0], places[:, 1], atol=1e-6)


def test_errors():
    head = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match=r"one CosineDense or Dense layer.*Sequential"):
        visualize.plot_prototype_cosines(small_model(head), X, Y)
    model = small_model(keras.layers.Dense(3))
    with pytest.raises(ValueError, match="`y` must hold classes 0 to 2"):
        visualize.plot_prototype_cosines(model, X, Y + 1)
    regression = small_model(keras.layers.Dense(3), task="regression")
    with pytest.raises(ValueError, match=r"`model` must be a classifier"):
        visualize.plot_prototype_cosines(regression, X, Y)
