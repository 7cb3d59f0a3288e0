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
        (
            {"a": [{"loss": [1], "val_loss": [2]}, {"loss": [1]}]},
            None,
            r"in all runs of a model.*\[0, 1\] values of 'val_loss' for 1 epochs of 'a'",
        ),
        (
            {"a": {"loss": [1, 2, 3, 4, 5], "val_loss": [2, 1, 1]}},
            None,
            r"for each n-th one.*\[3\] values of 'val_loss' for 5 epochs of 'a'",
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


def lines_of(axis):
    return [line for line in axis.lines if len(line.get_ydata())]


def test_what_has_no_validation_is_dashed_as_the_title_says():
    runs = {
        "one": {"loss": [2, 1], "val_loss": [2, 2], "entropy": [3, 2]},
        "other": {"loss": [3, 2], "entropy": [1, 1]},
    }
    figure = visualize.plot_training_curves(runs)
    styles = [[line.get_linestyle() for line in lines_of(axis)] for axis in figure.axes]
    assert styles == [["--", "-", "--"], ["--", "--"]]
    assert "dashed in training" in figure.get_suptitle()
    # Without anything to tell apart, lines are solid.
    figure = visualize.plot_training_curves(runs, "entropy")
    assert [line.get_linestyle() for line in lines_of(figure.axes[0])] == ["-", "-"]
    assert figure.get_suptitle() == "One run each"


def test_a_single_metric():
    figure = visualize.plot_training_curves(RUNS, metrics="loss")
    assert [axis.get_title() for axis in figure.axes] == ["loss"]


def test_epochs_of_fit():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((4, 2)), np.ones(4)
    history = model.fit(
        x, y, initial_epoch=5, epochs=10, validation_data=(x, y), validation_freq=2,
        verbose=0,
    )  # fmt: skip
    (axis,) = visualize.plot_training_curves(history).axes
    drawn = [line.get_xdata().tolist() for line in lines_of(axis)]
    assert drawn == [[6, 7, 8, 9, 10], [6, 8, 10]]
    # A history alone begins at 1, as does one that lacks some epochs' numbers.
    history.epoch = history.epoch[2:]
    history.history.pop("val_loss")
    for given in (history, {"model": history.history}):
        (axis,) = visualize.plot_training_curves(given).axes
        assert lines_of(axis)[0].get_xdata().tolist() == [1, 2, 3, 4, 5]


def test_error_of_runs_of_other_epochs():
    histories = []
    for start in (0, 2):
        history = keras.callbacks.History()
        history.history, history.epoch = {"loss": [1, 2]}, [start, start + 1]
        histories.append(history)
    with pytest.raises(ValueError, match=r"the same epochs.*epochs \[1, 3\] on for 'a'"):
        visualize.plot_training_curves({"a": histories})


def test_labels_of_a_narrow_range_of_costs():
    figure = visualize.plot_costs(
        {
            "entries": {"head": {100: 1.02, 1000: 1.28, 1024: 1.2}},
            "batch": {"head": {32: 5.5, 64: 9.5}},
        }
    )
    figure.canvas.draw()
    for axis in figure.axes:
        low, high = axis.get_ylim()
        ticks = zip(axis.get_yticks(), axis.get_yticklabels(), strict=True)
        told = [text.get_text() for value, text in ticks if low <= value <= high]
        assert len(list(filter(None, told))) >= 2
    # The label of 1024 would stand on that of 1000.
    labels = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert labels == ["100", "1,000", ""]
