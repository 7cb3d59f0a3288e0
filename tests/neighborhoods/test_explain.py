"""What entries add to outputs: closed forms, sums, and the integral by other means."""

import adapting_heads as heads
import numpy as np
import pytest
from helpers import as_numpy, normal, refused

import nsl_keras
from nsl_keras.neighborhoods.dual_form import DualForm
from nsl_keras.neighborhoods.inner_loop import InnerLoop

SMALL = {"inner_learning_rate": 0.05, "learning_rate_form": "fixed"}
ENTRIES, OUTPUTS, BATCH = heads.ENTRIES, heads.OUTPUTS, heads.BATCH


def neighbors_of(layer, k=ENTRIES):
    found = layer.neighbors(heads.features(), k, by="effect")
    return type(found)(*(as_numpy(tensor) for tensor in found))


def changes_of(layer):
    found = neighbors_of(layer)
    ordered = np.empty_like(found.output_changes)
    ordered[np.arange(BATCH)[:, None], found.indices] = found.output_changes
    return ordered


def check_close(found, expected, tolerance):
    tolerance = tolerance if heads.IS_TENSORFLOW else max(tolerance, 1e-5)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("task", "general"),
    [("classification", False), ("classification", True), ("regression", False)],
)
def test_closed_form_of_a_dense_head(task, general, monkeypatch):
    """Also by what deeper heads take, the average of slopes over a path."""
    if general:
        monkeypatch.setattr(DualForm, "effects", InnerLoop.effects)
    layer = heads.build("linear", task=task)
    keys, values, kernel, bias, weights = heads.parts(layer)
    outputs = keys @ kernel + bias
    if task == "classification":
        gradients = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True) - values
    else:
        gradients = 2 * (outputs - values)
    # An entry's own step on kernel and bias, seen from the example.
    lever = weights * (as_numpy(heads.features()) @ keys.T + 1)
    expected = -float(layer.learning_rate.rates()[0]) * lever[..., None] * gradients
    check_close(changes_of(layer), expected, 1e-12)


@pytest.mark.parametrize(
    ("kinds", "options", "tolerance"),
    [
        # A polynomial in the attention: exact.
        (("linear",), {"task": "regression", "inner_steps": 2}, 1e-12),
        (("relu", "linear"), SMALL, 1e-9),
    ],
    ids=str,
)
def test_changes_of_all_entries_sum_to_the_change(kinds, options, tolerance):
    layer, z = heads.build(*kinds, **options), heads.features()
    change = as_numpy(layer(z) - layer.head(z))
    check_close(neighbors_of(layer).output_changes.sum(axis=1), change, tolerance)


def test_a_large_step_leaves_a_small_error_of_the_integral():
    """What the docstring says of a cosine layer."""
    head, x = nsl_keras.layers.CosineDense(3), normal(64, 8)
    model = nsl_keras.MetaNeighborhoodModel(None, head, 12, inner_learning_rate=0.9)
    model.build(x.shape)
    found = model.neighbors(x, k=12, effects=True, batch_size=64)
    change = found.after - found.before
    errors = np.abs(found.output_changes.sum(axis=1) - change).max(axis=1)
    assert np.all(errors < 1e-3 * np.abs(change).max(axis=1))


@pytest.mark.jax
def test_rankings():
    layer, z = heads.build("cosine"), heads.features()
    changes = changes_of(layer)
    effects = np.abs(changes).sum(axis=2)
    np.testing.assert_array_equal(neighbors_of(layer).indices, np.argsort(-effects))
    attention = as_numpy(layer.dictionary.attention(z))
    found, same = layer.neighbors(z, 3), layer.neighbors(z, 3, effects=True)
    for each in (found, same):  # Also that fewer neighbors are the first ones.
        np.testing.assert_array_equal(each.indices, np.argsort(-attention)[:, :3])
    assert found.output_changes is None
    values = as_numpy(layer.dictionary.values)
    np.testing.assert_allclose(found.values, values[as_numpy(found.indices)], rtol=1e-6)
    expected = np.take_along_axis(changes, as_numpy(same.indices)[..., None], 1)
    check_close(as_numpy(same.output_changes), expected, 1e-12)
    for wrong, message in ({"k": 5.0}, "`k` must be"), ({"effects": 1}, "`effects` must"):
        with refused(message):
            layer.neighbors(z, **wrong)
