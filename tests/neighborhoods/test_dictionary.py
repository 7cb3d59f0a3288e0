"""Attention, dropout and values of the dictionary."""

import keras
import numpy as np
import pytest
from keras import ops

from nsl_keras.layers import NeighborDictionary
from nsl_keras.neighborhoods.dictionary import _coprimes


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_attention(metric):
    layer = NeighborDictionary(6, 3, metric=metric, temperature=0.5)
    rng = np.random.default_rng(0)
    z, keys = rng.normal(size=(4, 5)), rng.normal(size=(6, 5))
    layer.build((None, 5))
    layer.keys.assign(keys)
    if metric == "cosine":
        lengths = np.linalg.norm(z, axis=1)[:, None] * np.linalg.norm(keys, axis=1)
        scores = z @ keys.T / lengths / 0.5
    else:
        scores = -((z[:, None] - keys) ** 2).sum(axis=-1) / 0.5
    expected = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(layer(z.astype("float32")), expected, rtol=1e-4)


@pytest.mark.parametrize("entries", [1, 2, 7, 64, 501])
@pytest.mark.parametrize("scope", ["example", "batch"])
def test_dropout_leaves_out_exactly_so_many(entries, scope):
    layer = NeighborDictionary(entries, 3, dropout=0.5, dropout_scope=scope, seed=0)
    z = np.random.default_rng(0).normal(size=(16, 5)).astype("float32")
    weights = ops.convert_to_numpy(layer(z, training=True))
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
    kept = weights > 0
    np.testing.assert_array_equal(kept.sum(axis=1), entries - entries // 2)
    if entries > 500:
        rows = {tuple(row) for row in kept}
        assert len(rows) == (1 if scope == "batch" else 16)
        again = ops.convert_to_numpy(layer(z, training=True)) > 0
        assert (again != kept).any()
    assert np.all(ops.convert_to_numpy(layer(z, training=False)) > 0)


def test_dropout_is_uniform_and_nearly_independent():
    """Every entry, and every pair of entries, stays as often as chance says."""
    entries, rows = 20, 4000
    layer = NeighborDictionary(entries, 3, dropout=0.5, seed=1)
    layer.build((None, 2))
    kept = np.concatenate(
        [
            ops.convert_to_numpy(layer.draw_kept(np.zeros((80, 2), "float32"), True))
            for _ in range(rows // 80)
        ]
    ).astype(float)
    # Standard deviation of a mean over 4000 rows: 0.008 and less.
    np.testing.assert_allclose(kept.mean(axis=0), 0.5, atol=0.04)
    pairs = kept.T @ kept / rows
    off_diagonal = pairs[~np.eye(entries, dtype=bool)]
    np.testing.assert_allclose(off_diagonal, 0.25 * 18 / 19, atol=0.04)


def test_same_seed_same_draws():
    z = np.ones((4, 5), "float32")
    first, second = (NeighborDictionary(64, 3, seed=3) for _ in range(2))
    masks = [ops.convert_to_numpy(each(z, training=True)) > 0 for each in (first, second)]
    np.testing.assert_array_equal(*masks)


def test_coprimes_stay_in_int32():
    for size in (1, 2, 12, 5000, 46341, 100_000, 1_000_000):
        largest = max(_coprimes(size))
        assert (size - 1) * largest + size - 1 < 2**31
        assert len(_coprimes(size)) > min(size, 1000) // 8


def test_values():
    fixed = NeighborDictionary(7, 3, fixed_values=True)
    fixed.build((None, 2))
    values = ops.convert_to_numpy(fixed.values)
    assert values.argmax(axis=1).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert len(fixed.trainable_variables) == 1
    learned = NeighborDictionary(7, 3, value_scale=2.0)
    learned.build((None, 2))
    logits = np.random.default_rng(0).normal(size=(7, 3))
    learned.value_logits.assign(logits)
    expected = np.exp(2 * logits) / np.exp(2 * logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(learned.values, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_neighbors": 0}, "`num_neighbors` must be a positive integer"),
        ({"num_values": -1}, "`num_values` must be a positive integer"),
        ({"dropout": 1.0}, r"`dropout` must be a number in \[0, 1\)"),
        ({"temperature": -1}, "`temperature` must be a finite number above zero"),
        ({"value_scale": 0}, "`value_scale` must be a finite number above zero"),
        ({"metric": "dot"}, "`metric` must be one of 'cosine', 'euclidean'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        NeighborDictionary(**{"num_neighbors": 4, "num_values": 3, **arguments})


def test_bad_inputs():
    layer = NeighborDictionary(4, 3)
    with pytest.raises(ValueError, match="last axis of the input must be known"):
        layer.build((None, None))
    layer.build((None, 5))
    with pytest.raises(ValueError, match="expected axis -1 of input shape to have value 5"):
        layer(keras.ops.ones((2, 6)))
    with pytest.raises(ValueError, match="expected ndim=2"):
        NeighborDictionary(4, 3)(keras.ops.ones((2, 6, 5)))
