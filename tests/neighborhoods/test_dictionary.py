"""Attention, dropout and values of the dictionary, and entries from examples."""

import keras
import numpy as np
import pytest
from helpers import as_numpy, assert_all_equal, assert_equal, normal, refusing

import nsl_keras
from nsl_keras.layers import (
    CosineDense,
    InstanceFiLM,
    MetaNeighborhoodHead,
    NeighborDictionary,
)

X = normal(60, 4)
#: 40, 15 and 5 examples of three classes.
LABELS = np.repeat([0, 1, 2], [40, 15, 5])[np.random.default_rng(0).permutation(60)]
SOFT = 0.7 * np.eye(3)[LABELS] + 0.1


def built(num_neighbors=4, num_values=3, features=4, **options):
    layer = NeighborDictionary(num_neighbors, num_values, **options)
    layer.build((None, features))
    return layer


@pytest.mark.parametrize("entries", [1, 7, 501])
@pytest.mark.parametrize("scope", ["example", "batch"])
def test_dropout_leaves_out_exactly_so_many(entries, scope):
    def dictionary():
        return NeighborDictionary(entries, 3, dropout=0.5, dropout_scope=scope, seed=0)

    layer = dictionary()
    weights = as_numpy(layer(X[:16], training=True))
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
    kept = weights > 0
    np.testing.assert_array_equal(kept.sum(axis=1), entries - entries // 2)
    if entries > 500:
        assert len({tuple(row) for row in kept}) == (1 if scope == "batch" else 16)
        assert ((as_numpy(layer(X[:16], training=True)) > 0) != kept).any()
        assert_equal(as_numpy(dictionary()(X[:16], training=True)) > 0, kept)
    assert np.all(as_numpy(layer(X[:16], training=False)) > 0)


def test_dropout_of_a_share_that_binary_numbers_miss():
    # 100 * 0.29 is a little less than 29.
    assert NeighborDictionary(100, 3, dropout=0.29).num_dropped == 29
    assert NeighborDictionary(7, 3, dropout=0.5).num_dropped == 3
    assert NeighborDictionary(3, 3, dropout=0.9999999).num_dropped == 2  # One is kept.


def test_dropout_is_uniform_and_nearly_independent():
    entries, rows = 20, 4000
    layer = built(entries, features=2, seed=1)
    nothing = np.zeros((400, 2), "float32")
    draws = [as_numpy(layer.draw_kept(nothing)) for _ in range(rows // 400)]
    kept = np.concatenate(draws).astype(float)
    # The standard deviation of a mean over 4000 independent rows is below 0.008.
    np.testing.assert_allclose(kept.mean(axis=0), 0.5, atol=0.04)
    pairs = kept.T @ kept / rows
    off_diagonal = pairs[~np.eye(entries, dtype=bool)]
    np.testing.assert_allclose(off_diagonal, 0.25 * 18 / 19, atol=0.04)


def test_a_batch_looks_up_the_kept_entries_alone():
    layer = built(8, dropout_scope="batch", seed=0)
    entries, attention = layer.look_up(X[:5], training=True)
    assert (entries.keys.shape, entries.values.shape) == ((4, 4), (4, 3))
    keys = as_numpy(layer.keys)
    taken = rows_of(entries.keys, keys)
    masked = as_numpy(layer.attention(X[:5], np.isin(np.arange(8), taken)[None]))
    np.testing.assert_allclose(attention, masked[:, taken], rtol=1e-5)
    whole, attention = layer.look_up(X[:5])
    assert tuple(whole.keys.shape) == (8, 4)
    np.testing.assert_allclose(attention, layer(X[:5]), rtol=1e-6)


def test_values():
    fixed = built(7, fixed_values=True)
    classes = as_numpy(fixed.values).argmax(axis=1)
    assert classes.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert len(fixed.trainable_variables) == 1
    learned = built(7, value_scale=2.0)
    logits = normal(7, 3)
    learned.raw_values.assign(logits)
    expected = np.exp(2 * logits) / np.exp(2 * logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(learned.values, expected, rtol=1e-5)
    given = np.array([[0.5, 0.5, 0.0], [0.0, 0.2, 0.8]])
    dictionary = built(2, None, fixed_values=given)  # The values tell their length.
    np.testing.assert_allclose(dictionary.values, given, rtol=1e-6)
    again = NeighborDictionary.from_config(dictionary.get_config())
    assert (again.fixed_values, again.num_values) == (given.tolist(), 3)
    assert 0 < np.abs(as_numpy(built(7, task="regression").values)).max() < 0.1


def test_the_head_sets_what_is_left_open():
    dictionary = NeighborDictionary(5)
    head = MetaNeighborhoodHead(keras.layers.Dense(2), dictionary, task="regression")
    head.build((None, 4))
    assert (dictionary.num_values, dictionary.task) == (2, "regression")
    assert dictionary.get_config()["num_values"] == 2
    for units in (3, 2):
        message = rf"num_values and task, \({units}, 'classif.*=\(2, 'regression'\)"
        with pytest.raises(ValueError, match=message):
            MetaNeighborhoodHead(CosineDense(units), dictionary).build((None, 4))


def started(
    x=X, y=LABELS, entries=12, seed=None, values=3, task="classification", **options
):
    """A dictionary whose entries are examples."""
    dictionary = NeighborDictionary(entries, **options)
    head = keras.layers.Dense(values)
    model = nsl_keras.MetaNeighborhoodModel(None, head, dictionary, task=task)
    model.initialize_from(x, y, seed)
    return dictionary


def rows_of(keys, x=X):
    """Which examples the keys are."""
    distances = np.abs(as_numpy(keys)[:, None] - x).max(axis=-1)
    assert np.all(distances.min(axis=1) < 1e-6)
    return distances.argmin(axis=1)


@pytest.mark.parametrize(
    ("labels", "entries", "shares"),
    [(LABELS, 12, [4, 4, 4]), (LABELS[:, None], 60, [40, 15, 5]), (SOFT, 24, [10, 9, 5])],
)
def test_entries_are_examples_in_equal_shares(labels, entries, shares):
    dictionary = started(X, labels, entries, seed=1)
    rows = rows_of(dictionary.keys)
    assert len(set(rows)) == entries
    assert np.bincount(LABELS[rows]).tolist() == shares
    expected = SOFT[rows] if labels is SOFT else np.eye(3)[LABELS[rows]]
    np.testing.assert_allclose(dictionary.values, expected, atol=0.011)
    # One-hot values keep a gradient: none is exactly 0 or 1.
    assert np.all(as_numpy(dictionary.values) > 0.003)


def test_a_learned_temperature_in_half_precision():
    dictionary = NeighborDictionary(6, 3, learn_temperature=True, dtype="bfloat16")
    assert dictionary(np.ones((2, 4))).shape == (2, 6)


def test_seeds_and_fewer_entries_than_classes():
    seeds = (1, 1, 2, None)
    drawn = [tuple(rows_of(started(entries=2, seed=seed).keys)) for seed in seeds]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3
    assert len(set(LABELS[list(drawn[0])])) == 2


@pytest.mark.parametrize("targets", [X[:, 0], X[:, :2]])
def test_regression_keeps_targets(targets):
    """A row of zeros has no direction, and no effect on the step of another entry."""
    columns, x = targets.reshape(60, -1), np.where(np.arange(60)[:, None] == 3, 0, X)
    dictionary = started(x, targets, 60, values=columns.shape[1], task="regression")
    rows = rows_of(dictionary.keys, x)
    assert len(set(rows)) == 60
    np.testing.assert_allclose(dictionary.values, columns[rows], rtol=1e-6)


def test_a_model_s_entries_are_its_features():
    """In inference mode; an example is then its own nearest neighbor."""
    layers = [keras.Input((4,)), keras.layers.Dense(6), keras.layers.Dropout(0.5)]
    model = nsl_keras.MetaNeighborhoodModel(keras.Sequential(layers), CosineDense(3), 12)
    drawn = model.initialize_from(X, LABELS, seed=4, batch_size=5)
    features = as_numpy(model.backbone(X))
    dictionary = started(features, seed=4)
    np.testing.assert_allclose(model.dictionary.keys, dictionary.keys, rtol=1e-5)
    np.testing.assert_allclose(model.dictionary.values, dictionary.values, rtol=1e-5)
    rows = rows_of(model.dictionary.keys, features)
    np.testing.assert_array_equal(drawn, rows)
    found = model.neighbors(X[drawn], k=1, by="attention")
    np.testing.assert_array_equal(found.indices[:, 0], np.arange(12))


@pytest.mark.parametrize(
    ("head", "options", "curvature"),
    [
        (keras.layers.Dense(3), {}, 0.5),
        (keras.layers.Dense(1), {"task": "regression"}, 2),
        (CosineDense(3), {}, None),
        (keras.layers.Dense(3), {"learning_rate_form": "fixed"}, None),
        (keras.layers.Dense(3), {"inner_learning_rate": 1e-5}, None),
    ],
    ids=["dense", "regression", "cosine", "fixed", "small"],
)
def test_a_step_on_an_entry_does_not_overshoot(head, options, curvature):
    """Below the inverse of the loss's curvature along the features, whose length varies."""
    model = nsl_keras.MetaNeighborhoodModel(None, head, 12, **options)
    targets = X[:, 0] if "task" in options else LABELS
    model.initialize_from(100 * X, targets)
    squares = (as_numpy(model.dictionary.keys) ** 2).sum(axis=1).mean()
    expected = options.get("inner_learning_rate", 0.05)
    if curvature:
        expected = 1 / (curvature * (squares + 1))
    np.testing.assert_allclose(model.inner_learning_rates[0], expected, rtol=1e-5)


def test_assign():
    dictionary = built(value_scale=5.0)
    values = np.array([[1, 0, 0], [0.2, 0.3, 0.5], [0, 1, 0], [0.25, 0.25, 0.5]])
    dictionary.assign(values=values)
    dictionary.assign(X[:4])
    np.testing.assert_allclose(dictionary.values, values, atol=1e-6)
    np.testing.assert_array_equal(dictionary.keys, X[:4])


@pytest.mark.parametrize("kind", [NeighborDictionary, InstanceFiLM])
def test_the_seed_counts_when_a_layer_is_made(kind):
    found = []
    for seed in (1, 2):
        keras.utils.set_random_seed(0)
        layer = kind(4, 3) if kind is NeighborDictionary else kind(4)
        keras.utils.set_random_seed(seed)
        layer.build((None, 5))
        found.append(layer.get_weights())
    assert_all_equal(*found)


def in_a_head(dictionary):
    return MetaNeighborhoodHead(CosineDense(3), dictionary)


def assign(keys=X[:4], fixed_values=False, **values):
    """Assigns entries: none if not all."""
    dictionary = built(fixed_values=fixed_values)
    before = dictionary.get_weights()
    try:
        dictionary.assign(keys, **values)
    finally:
        assert_all_equal(dictionary.get_weights(), before)


test_errors = refusing(
    (lambda: built(0), "`num_neighbors` must be a positive integer"),
    (lambda: built(num_values=None), "`num_values` must be given"),
    (lambda: NeighborDictionary(5, 3).values, "`values` needs a built layer"),
    (lambda: built(dropout=1.0), r"`dropout` must be a number in \[0, 1\)"),
    (lambda: built(dropout_scope="layer"), "`dropout_scope` must be one of"),
    (lambda: built(temperature=-1), "`temperature` must be a finite number above zero"),
    (lambda: built(metric="dot"), "`metric` must be one of 'cosine', 'euclidean'"),
    (lambda: built(task="ranking"), "`task` must be one of 'classification'"),
    (lambda: built(task="regression", fixed_values=True), "must be False or the values"),
    (lambda: built(fixed_values=np.ones((3, 2))), "`fixed_values` must be numbers of"),
    (lambda: built(fixed_values=[[np.nan] * 3] * 4), "`fixed_values` must be finite"),
    (lambda: built(fixed_values=[[1, 1, 0]] * 4), "hold a probability distribution"),
    (lambda: started(X[:9], LABELS[:9]), "at least 12, one for each entry, or.*=9"),
    (lambda: started(seed=-1), "`seed` must be"),
    (lambda: in_a_head(built()).build((None, 6)), "with keys of the 6 features"),
    (lambda: started(X, LABELS[:-1]), r"`len\(y\)` must be 60, .*=59"),
    (lambda: started(fixed_values=True), "`values` must be None if the dictionary has"),
    (lambda: assign(np.full((4, 4), np.nan)), "`keys` must be finite"),
    (lambda: assign(values=np.eye(3)), r"`values` must be numbers of shape \(4, 3\)"),
    (lambda: assign(values=np.eye(3), fixed_values=True), "`values` must be None if"),
)
