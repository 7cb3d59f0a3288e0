"""What entries add to outputs: closed forms, sums, and the integral by other means."""

import keras
import numpy as np
import pytest
from keras import ops

import nsl_keras
from nsl_keras.layers import CosineDense, MetaNeighborhoodHead
from nsl_keras.neighborhoods import dual_form, inner_loss

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
DTYPE = "float64" if IS_TENSORFLOW else "float32"
ENTRIES, FEATURES, OUTPUTS, BATCH = 7, 5, 3, 4
RNG = np.random.default_rng(3)
FEATURES_OF_EXAMPLES = RNG.normal(size=(BATCH, FEATURES))


def head_of(*kinds):
    layers = [
        CosineDense(OUTPUTS, scale=3.0, dtype=DTYPE)
        if kind == "cosine"
        else keras.layers.Dense(
            OUTPUTS if index == len(kinds) - 1 else 6, kind, dtype=DTYPE
        )
        for index, kind in enumerate(kinds)
    ]
    return layers[0] if len(layers) == 1 else keras.Sequential(layers)


def build(*kinds, **options):
    layer = MetaNeighborhoodHead(
        head_of(*kinds),
        ENTRIES,
        inner_learning_rate=0.3,
        dictionary_dropout=0.0,
        dtype=DTYPE,
        **options,
    )
    layer.build((None, FEATURES))
    rng = np.random.default_rng(0)
    for variable in layer.trainable_variables:
        value = 0.5 * rng.normal(size=variable.shape)
        variable.assign(value + 3.0 if variable.name == "scale" else value)
    return layer


def features():
    return ops.convert_to_tensor(FEATURES_OF_EXAMPLES, dtype=DTYPE)


def as_numpy(found):
    return type(found)(*(ops.convert_to_numpy(tensor) for tensor in found))


def in_order_of_entries(found):
    """The changes of all entries, by entry number."""
    rows = np.arange(BATCH)[:, None]
    ordered = np.empty_like(found.output_changes)
    ordered[rows, found.indices] = found.output_changes
    return ordered


def check_close(found, expected, tolerance):
    tolerance = tolerance if IS_TENSORFLOW else max(tolerance, 1e-5)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("inner_loop", ["dual", "tape"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_closed_form_of_a_dense_head(task, inner_loop):
    layer = build("linear", task=task, inner_loop=inner_loop)
    found = as_numpy(layer.neighbors(features(), k=ENTRIES))
    keys, kernel, bias = (
        ops.convert_to_numpy(v.value)
        for v in (layer.dictionary.keys, layer.head.kernel, layer.head.bias)
    )
    values = ops.convert_to_numpy(layer.dictionary.values)
    outputs = keys @ kernel + bias
    if task == "classification":
        gradients = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True) - values
    else:
        gradients = 2 * (outputs - values)
    weights = ops.convert_to_numpy(layer.dictionary.attention(features()))
    rate = float(layer.rate.rates()[0])
    # An entry's own step on kernel and bias, seen from the example.
    lever = weights * (FEATURES_OF_EXAMPLES @ keys.T + 1)
    expected = -rate * lever[..., None] * gradients
    check_close(in_order_of_entries(found), expected, 1e-12)


@pytest.mark.parametrize(
    ("kinds", "steps", "tolerance"),
    [
        (("linear",), 1, 1e-12),
        (("linear",), 3, 1e-9),
        (("cosine",), 1, 1e-8),
        (("cosine",), 2, 1e-4),
        (("tanh", "linear"), 1, 1e-9),
        (("tanh", "linear"), 2, 1e-9),
        (("relu", "linear"), 1, 1e-2),
    ],
    ids=str,
)
def test_changes_of_all_entries_sum_to_the_change(kinds, steps, tolerance):
    layer = build(*kinds, inner_steps=steps)
    found = as_numpy(layer.neighbors(features(), k=ENTRIES))
    change = layer.adapted_logits(features()) - layer.head(features())
    check_close(found.output_changes.sum(axis=1), ops.convert_to_numpy(change), tolerance)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="finite differences need float64")
@pytest.mark.parametrize("kinds", [("cosine",), ("tanh", "cosine")], ids=str)
def test_changes_of_single_entries(kinds):
    """The integral over a path of small steps, one entry's weight moved at a time."""
    layer = build(*kinds, inner_steps=2)
    dictionary = layer.dictionary
    attention = ops.convert_to_numpy(dictionary.attention(features()))
    # Axes: points of the path, entries, up or down, examples, entries.
    points = (np.arange(60) + 0.5) / 60
    moves = np.einsum("s,ej->esj", [1e-4, -1e-4], np.eye(ENTRIES))[None, :, :, None]
    weights = (points[:, None, None, None, None] + moves) * attention
    queries = np.broadcast_to(FEATURES_OF_EXAMPLES, (*weights.shape[:-1], FEATURES))
    outputs = dual_form.adapted_outputs(
        dual_form.stages_of(layer.head),
        ops.convert_to_tensor(dictionary.keys),
        dictionary.values,
        ops.convert_to_tensor(weights.reshape(-1, ENTRIES)),
        ops.convert_to_tensor(queries.reshape(-1, FEATURES)),
        layer.rate.rates(),
        2,
        inner_loss.cross_entropy,
        ENTRIES,
    )
    outputs = ops.convert_to_numpy(outputs).reshape(*weights.shape[:-1], OUTPUTS)
    slopes = (outputs[:, :, 0] - outputs[:, :, 1]) / 2e-4
    expected = slopes.mean(axis=0).swapaxes(0, 1)
    found = as_numpy(layer.neighbors(features(), k=ENTRIES))
    check_close(in_order_of_entries(found), expected, 2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_dual_form_and_tape_agree(kind):
    dual, tape = (
        as_numpy(build(kind, inner_loop=loop).neighbors(features(), k=3))
        for loop in ("dual", "tape")
    )
    np.testing.assert_array_equal(dual.indices, tape.indices)
    check_close(dual.output_changes, tape.output_changes, 1e-12)


@pytest.mark.parametrize("steps", [1, 2])
def test_chunks_change_nothing(steps):
    whole, chunked = (
        as_numpy(build("cosine", inner_steps=steps, chunk_size=size).neighbors(features()))
        for size in (None, 3)
    )
    check_close(chunked.output_changes, whole.output_changes, 1e-12)


def test_few_entries_are_the_first_of_all():
    layer = build("cosine")
    few, many = (as_numpy(layer.neighbors(features(), k)) for k in (2, ENTRIES))
    for some, all_of_them in zip(few, many, strict=True):
        check_close(some, all_of_them[:, :2], 1e-12)


def test_entries_without_attention_change_nothing():
    layer = build("cosine", temperature=1e-4)
    found = as_numpy(layer.neighbors(features(), k=ENTRIES))
    assert np.abs(found.output_changes[:, 0]).max() > 0.01
    assert np.abs(found.output_changes[:, 1:]).max() < 1e-12


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_model_s_changes_in_batches(task):
    backbone = keras.Sequential([keras.Input((6,)), keras.layers.Dense(FEATURES)])
    model = nsl_keras.MetaNeighborhoodModel(
        keras.layers.Dense(OUTPUTS), backbone, 10, inner_learning_rate=0.5, task=task
    )
    x = RNG.normal(size=(9, 6)).astype("float32")
    model.build(x.shape)
    dictionary = model.neighborhood.dictionary
    dictionary.keys.assign(RNG.normal(size=(10, FEATURES)))
    found = model.neighbors(x, k=10, batch_size=4)
    assert isinstance(found.output_changes, np.ndarray)
    assert found.output_changes.shape == (9, 10, OUTPUTS)
    change = ops.convert_to_numpy(model(x) - model(x, adapt=False))
    assert np.abs(change).max() > 0.01
    np.testing.assert_allclose(found.output_changes.sum(axis=1), change, atol=1e-5)
