"""MAML with an inner loss: targets of any shape instead of classes."""

import keras
import numpy as np
import pytest
from finite_differences import at_values
from helpers import as_numpy, refused, reloaded, stacked
from keras import layers

from nsl_keras.backend import gradients_of
from nsl_keras.few_shot import MAML

RATE = 0.1


def network(*outputs, activation=None):
    """From vectors of 3 numbers to outputs of a shape."""
    dense = layers.Dense(5, "softplus"), layers.Dense(int(np.prod(outputs)), activation)
    return stacked((3,), *dense, layers.Reshape(outputs))


def linear():
    return stacked((3,), layers.Dense(1))


def episodes(*outputs, count=4, support=5, queries=6):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, support + queries, 3))
    y = np.sin(x @ rng.normal(size=(count, 3, int(np.prod(outputs)))))
    y = y.reshape(count, -1, *outputs)
    return (x[:, :support], y[:, :support], x[:, support:]), y[:, support:]


def compiled(model, loss="mean_squared_error"):
    model.compile(keras.optimizers.Adam(0.01), loss, run_eagerly=True)
    return model


def after_steps(model, x, y, steps):
    """The kernel and bias of a linear model after steps on the mean squared error."""
    kernel, bias = map(as_numpy, model.weights)
    for _ in range(steps):
        error = x @ kernel + bias - y
        kernel = kernel - RATE * 2 * x.T @ error / len(x)
        bias = bias - RATE * 2 * error.mean(axis=0)
    return kernel, bias


def test_steps_in_training_at_test_and_of_adapt_equal_those_written_out(tmp_path):
    options = {"inner_loss": "mse", "inner_learning_rate": RATE}
    model = MAML(linear(), inner_steps=1, test_inner_steps=3, **options)
    inputs, _ = episodes(1)
    for training, steps in {True: 1, False: 3}.items():
        outputs = as_numpy(model(inputs, training=training))
        for row, x, y, queries in zip(outputs, *inputs, strict=True):
            kernel, bias = after_steps(model.model, x, y, steps)
            np.testing.assert_allclose(row, queries @ kernel + bias, atol=1e-5)
    adapted = model.adapt(inputs[0][0], inputs[1][0])
    for each in (adapted, reloaded(adapted, tmp_path)):
        found = each.predict(inputs[2][0], verbose=0)
        np.testing.assert_allclose(found, as_numpy(model(inputs))[0], atol=1e-5)
        assert not hasattr(each.layers[-1], "class_names")


def test_first_order_gradients_are_those_at_the_weights_after_the_steps():
    (x, y, queries), targets = episodes(1, count=1)
    options = {"inner_learning_rate": RATE, "inner_steps": 2, "first_order": True}
    model = MAML(linear(), inner_loss="mse", **options)
    model((x, y, queries))

    def squared_error():
        outputs = model((x, y, queries), training=True)
        return keras.ops.mean(keras.ops.square(outputs - targets))

    loss, values = at_values(squared_error, model.trainable_variables)
    (found, _), _ = gradients_of(lambda at: (loss(at), None), values)
    kernel, bias = after_steps(model.model, x[0], y[0], 2)
    expected = 2 * queries[0].T @ (queries[0] @ kernel + bias - targets[0]) / 6
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("outputs", "loss"), [((2, 3), "huber"), ((), "huber"), ((2,), "binary_crossentropy")]
)
def test_targets_of_any_shape_and_any_loss(outputs, loss, tmp_path, eager):
    inputs, targets = episodes(*outputs)
    made = network(*outputs, activation="sigmoid")
    if loss == "binary_crossentropy":  # Several labels at once.
        inputs, targets = (inputs[0], 1.0 * (inputs[1] > 0), inputs[2]), 1.0 * (targets > 0)
    inner_loss = keras.losses.get(loss)
    model = compiled(MAML(made, inner_steps=1, inner_loss=inner_loss), loss)
    weights = np.array([1.0, 2.0, 0.0, 1.0])
    history = model.fit(inputs, targets, epochs=2, sample_weight=weights, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]
    assert model.get_build_config()["input_shape"][1][2:] == outputs  # Exports use it.
    found = model.predict(inputs, verbose=0)
    assert found.shape == targets.shape
    assert model.compute_output_shape([each.shape for each in inputs]) == found.shape
    assert model.adapt(inputs[0][0], inputs[1][0]).output_shape[1:] == outputs
    again = reloaded(model, tmp_path)
    np.testing.assert_array_equal(again.predict(inputs, verbose=0), found)


@pytest.mark.parametrize(
    ("outputs", "reduction"),
    [
        ((), "sum_over_batch_size"),
        ((4, 3), "sum_over_batch_size"),
        ((1,), "mean_with_sample_weight"),
        ((2, 2, 2), "mean_with_sample_weight"),
    ],
)
def test_weights_of_episodes_and_queries_for_outputs_of_all_axes(outputs, reduction):
    inputs, targets = episodes(*outputs)  # As many episodes as rows: shapes mislead.
    loss = keras.losses.MeanSquaredError(reduction)
    model = compiled(MAML(network(*outputs), inner_steps=1, inner_loss="mse"), loss)
    errors = (as_numpy(model(inputs)) - targets) ** 2
    errors = np.mean(errors.reshape(*errors.shape[:2], -1), axis=2)
    for weights in (np.arange(4.0), np.arange(24.0).reshape(4, 6)):
        found = model.evaluate(inputs, targets, sample_weight=weights, verbose=0)
        every = np.broadcast_to(weights.reshape(4, -1), errors.shape)
        by_weight = reduction == "mean_with_sample_weight"
        expected = np.sum(errors * every) / (every.sum() if by_weight else every.size)
        np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_bad_targets():
    (x, y, queries), targets = episodes(1)
    model = compiled(MAML(linear(), inner_loss="mse"))
    for inputs, given, message in (
        ((x, y / 0, queries), targets, "`support_labels` must be finite"),
        ((x, y, queries), targets / 0, "`y` must be finite"),
        ((x, y[..., 0], queries), targets, r"support examples, 1\).*\(4, 5\)"),
        ((x, y, queries), targets[:, :1], "`y` must be of the shape of the outputs"),
    ):
        with refused(message):
            model.fit(inputs, given, verbose=0)
    for given, message in (
        (y[0, :, 0], "`y` must be of the shape of the outputs"),
        (None, "`y` must be given, unless"),
        (y[0] / 0, "`y` must be finite"),
    ):
        with refused(message):
            model.adapt(x[0], given)
