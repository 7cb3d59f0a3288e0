"""Curves of training and of costs: what is drawn, and what is refused."""

import keras
import numpy as np
import pytest
from pictures import check_saved

from nsl_keras import visualize

RUNS = {
    "plain": [
        {"loss": [2.0, 1.0], "val_loss": [2.2, 1.4], "learning_rate": [0.1, 0.1]},
        {"loss": [2.4, 1.2], "val_loss": [2.0, 1.6], "learning_rate": [0.1, 0.1]},
    ],
    "dynamic": [{"loss": [1.9, 0.9], "val_loss": [2.1, 1.2], "extra": [0, 0]}],
}


def test_means_and_ranges(tmp_path):
    figure = visualize.plot_training_curves(RUNS)
    check_saved(figure, tmp_path)
    (axis,) = figure.axes  # `loss` alone is common, and no learning rate is drawn.
    assert axis.get_title() == "loss"
    lines = [line.get_ydata().tolist() for line in axis.lines if len(line.get_ydata())]
    np.testing.assert_allclose(lines, [[2.2, 1.1], [2.1, 1.5], [1.9, 0.9], [2.1, 1.2]])
    styles = [line.get_linestyle() for line in axis.lines if len(line.get_ydata())]
    assert styles == ["--", "-"] * 2
    bands = [band.get_paths()[0].vertices[:, 1] for band in axis.collections]
    assert [(band.min(), band.max()) for band in bands] == [(1.0, 2.4), (1.4, 2.2)]
    assert "1 to 2 runs" in figure.get_suptitle()


def test_histories_of_fit():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(np.ones((4, 2)), np.ones(4), epochs=2, verbose=0)
    figure = visualize.plot_training_curves({"one": history}, metrics=["loss"])
    drawn = figure.axes[0].lines[0].get_ydata()
    np.testing.assert_allclose(drawn, history.history["loss"])
    assert figure.get_suptitle() == "One run each"
    by_itself = visualize.plot_training_curves(history)
    assert [axes.get_title() for axes in by_itself.axes] == ["loss"]


@pytest.mark.parametrize(
    ("histories", "metrics", "message"),
    [
        ({}, None, r"`histories` must hold at least one"),
        ([RUNS], None, r"`histories` must be a History, or .*Received: histories=\["),
        ({"a": 3}, None, r"`histories` must hold what `fit` returned.*int for 'a'"),
        ({"a": []}, None, r"`histories` must hold what `fit` returned.*list for 'a'"),
        (RUNS, ["accuracy"], r"`metrics` must be names.*missing 'accuracy' of 'plain'"),
        (
            {"a": {"loss": [1]}, "b": {"mse": [1]}},
            None,
            r"`metrics` must be names that all.*none in common",
        ),
        (
            {"a": [{"loss": [1]}, {"loss": [1, 2]}]},
            None,
            r"same number of epochs.*\[1, 2\] epochs for 'a'",
        ),
    ],
    ids=str,
)
def test_errors_of_training_curves(histories, metrics, message):
    with pytest.raises(ValueError, match=message):
        visualize.plot_training_curves(histories, metrics)


def test_costs(tmp_path):
    figure = visualize.plot_costs(
        {
            "entries": {"head": {1000: (2.0, 1.8, 2.2), 100: (1.2, 1.1, 1.3)}},
            "batch": {"head": {32: 2.5, 8: 3}, "layer": {8: 4.0}},
        }
    )
    check_saved(figure, tmp_path)
    entries, batch = figure.axes
    assert (entries.get_xlabel(), batch.get_xlabel()) == ("entries", "batch")
    assert entries.get_xscale() == entries.get_yscale() == "log"
    _, curve, *_ = entries.lines  # The first marks 1.
    assert list(curve.get_xdata()) == [100, 1000]
    assert list(curve.get_ydata()) == [1.2, 2.0]
    band = entries.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (1.1, 2.2)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["head", "layer"]


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({}, r"`costs` must hold at least one curve.*costs of nothing"),
        ({"batch": {}}, r"`costs` must hold at least one curve.*'batch'"),
        ({"batch": {"head": {}}}, r"`costs` must be numbers above 0.*'head' along 'batch'"),
        ({"batch": {"head": {0: 1}}}, r"`costs` must be numbers above 0.*\{0: 1\}"),
        ({"batch": {"head": {8: float("nan")}}}, r"`costs` must be numbers above 0"),
    ],
    ids=str,
)
def test_errors_of_costs(costs, message):
    with pytest.raises(ValueError, match=message):
        visualize.plot_costs(costs)
