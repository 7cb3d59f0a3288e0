"""Dictionaries from examples: which are drawn, and what becomes of their labels."""

import keras
import numpy as np
import pytest
from keras import ops

import nsl_keras
from nsl_keras.layers import CosineDense, MetaNeighborhoodHead, NeighborDictionary

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 4)).astype("float32")
#: 40, 15 and 5 examples of three classes.
LABELS = np.repeat([0, 1, 2], [40, 15, 5])[rng.permutation(60)]
SOFT = 0.7 * np.eye(3)[LABELS] + 0.1


def rows_of(keys, x=X):
    """Which examples the keys are."""
    distances = np.abs(ops.convert_to_numpy(keys)[:, None] - x).max(axis=-1)
    assert np.all(distances.min(axis=1) < 1e-6)
    return distances.argmin(axis=1)


@pytest.mark.parametrize("labels", [LABELS, LABELS[:, None], np.eye(3)[LABELS], SOFT])
@pytest.mark.parametrize(
    ("entries", "shares"), [(12, [4, 4, 4]), (24, [10, 9, 5]), (60, [40, 15, 5])]
)
def test_entries_are_examples_in_equal_shares(entries, shares, labels):
    dictionary = NeighborDictionary(entries, 3)
    dictionary.initialize_from(X, labels, seed=1)
    rows = rows_of(dictionary.keys)
    assert len(set(rows)) == entries
    assert np.bincount(LABELS[rows]).tolist() == shares
    soft = np.array_equal(labels, SOFT)
    expected = SOFT[rows] if soft else np.eye(3)[LABELS[rows]]
    np.testing.assert_allclose(dictionary.values, expected, atol=0.011)
    # One-hot values keep a gradient: none is exactly 0 or 1.
    assert np.all(ops.convert_to_numpy(dictionary.values) > 0.003)


def test_fewer_entries_than_classes():
    dictionary = NeighborDictionary(2, 3)
    dictionary.initialize_from(X, LABELS)
    assert len(set(LABELS[rows_of(dictionary.keys)])) == 2


def test_seeds():
    drawn = []
    for seed in (1, 1, 2, None):
        dictionary = NeighborDictionary(12, 3)
        dictionary.initialize_from(X, LABELS, seed=seed)
        drawn.append(tuple(rows_of(dictionary.keys)))
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


def test_fixed_values_get_keys_of_their_class():
    dictionary = NeighborDictionary(12, 3, fixed_values=True)
    dictionary.initialize_from(X, LABELS)
    values = ops.convert_to_numpy(dictionary.values)
    rows = rows_of(dictionary.keys)
    assert LABELS[rows].tolist() == values.argmax(axis=1).tolist()
    larger = NeighborDictionary(18, 3, fixed_values=True)
    with pytest.raises(ValueError, match="5 examples of class 2, which has 6 entries"):
        larger.initialize_from(X, LABELS)
    given = NeighborDictionary(2, 3, fixed_values=np.eye(3)[:2])
    with pytest.raises(ValueError, match="`fixed_values` must be True or False"):
        given.initialize_from(X, LABELS)


@pytest.mark.parametrize("targets", [X[:, 0], X[:, :1], X[:, :2]])
def test_regression_keeps_targets(targets):
    outputs = 1 if targets.ndim == 1 else targets.shape[1]
    dictionary = NeighborDictionary(12, outputs, task="regression")
    dictionary.initialize_from(X, targets)
    rows = rows_of(dictionary.keys)
    assert len(set(rows)) == 12
    expected = targets.reshape(60, outputs)[rows]
    np.testing.assert_allclose(dictionary.values, expected, rtol=1e-6)


def test_head_and_model_agree():
    """The model's keys are its backbone's features, in inference mode."""
    backbone = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(6), keras.layers.Dropout(0.5)]
    )
    model = nsl_keras.MetaNeighborhoodModel(CosineDense(3), backbone, 12)
    model.initialize_from(X, LABELS, seed=4, batch_size=5)
    features = ops.convert_to_numpy(backbone(X))
    head = MetaNeighborhoodHead(CosineDense(3), 12)
    head.initialize_from(features, LABELS, seed=4)
    for name in ("keys", "values"):
        np.testing.assert_allclose(
            getattr(model.neighborhood.dictionary, name),
            getattr(head.dictionary, name),
            rtol=1e-5,
            atol=1e-6,
        )
    found = model.neighbors(X[:20], k=1)
    nearest = rows_of(model.neighborhood.dictionary.keys, features)
    for row, index in enumerate(found.indices[:, 0]):
        if row in nearest:
            assert nearest[index] == row  # An example is its own nearest neighbour.


def test_half_precision_features():
    keras.config.set_dtype_policy("mixed_bfloat16")
    backbone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6)])
    model = nsl_keras.MetaNeighborhoodModel(CosineDense(3), backbone, 12)
    model.initialize_from(X, LABELS)
    features = ops.convert_to_numpy(ops.cast(backbone(X), "float32"))
    # One example or two may share features in so few digits.
    rows = rows_of(model.neighborhood.dictionary.keys, features)
    assert len(set(rows)) >= 11


def test_assign():
    dictionary = NeighborDictionary(4, 3, value_scale=5.0)
    dictionary.build((None, 4))
    values = np.array([[1, 0, 0], [0.2, 0.3, 0.5], [0, 1, 0], [0.25, 0.25, 0.5]])
    dictionary.assign(X[:4], values)
    np.testing.assert_allclose(dictionary.values, values, atol=1e-6)
    np.testing.assert_array_equal(dictionary.keys, X[:4])
    dictionary.assign(keys=X[4:8])
    np.testing.assert_allclose(dictionary.values, values, atol=1e-6)


def without(column, row=3):
    spoiled = X.copy()
    spoiled[row] = column
    return spoiled


@pytest.mark.parametrize(
    ("features", "labels", "options", "message"),
    [
        (X[:9], LABELS[:9], {}, "9 examples, num_neighbors=12"),
        (X, np.minimum(LABELS, 1), {}, "no example of class 2"),
        (X, np.zeros(60), {}, "no example of class 1, 2"),
        (X, LABELS + 1, {}, "`y` must hold classes 0 to 2"),
        (X, np.ones((60, 3)), {}, "must be a probability distribution"),
        (X, LABELS[:-1], {}, "must have the same length"),
        (without(np.nan), LABELS, {"num_neighbors": 60}, "must be finite"),
        (without(np.inf), LABELS, {"num_neighbors": 60}, "must be finite"),
        (
            without(0.0),
            LABELS,
            {"num_neighbors": 60},
            "`features` must not be all zero under the cosine metric.*1 such rows",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["dictionary", "head", "model"])
def test_bad_examples(kind, features, labels, options, message):
    options = {"num_neighbors": 12, **options}
    layer = {
        "dictionary": lambda: NeighborDictionary(num_values=3, **options),
        "head": lambda: MetaNeighborhoodHead(CosineDense(3), **options),
        "model": lambda: nsl_keras.MetaNeighborhoodModel(CosineDense(3), **options),
    }[kind]()
    with pytest.raises(ValueError, match=message):
        layer.initialize_from(features, labels)


def test_zero_features_are_points_under_the_euclidean_metric():
    dictionary = NeighborDictionary(60, 3, metric="euclidean")
    dictionary.initialize_from(without(0.0), LABELS)
    assert (ops.convert_to_numpy(dictionary.keys) == 0).all(axis=1).sum() == 1


def test_features_of_the_backbone_are_checked():
    backbone = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(6, kernel_initializer="zeros")]
    )
    model = nsl_keras.MetaNeighborhoodModel(CosineDense(3), backbone, 12)
    with pytest.raises(ValueError, match="`features` must not be all zero"):
        model.initialize_from(X, LABELS)
    with pytest.raises(ValueError, match=r"`x` and `y` must be arrays.*type generator"):
        model.initialize_from((row for row in X), LABELS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": X[:3]}, r"`keys` must have shape \(4, 4\)"),
        ({"keys": np.zeros((4, 4))}, "`keys` must not be all zero.*4 such rows"),
        ({"keys": np.full((4, 4), np.nan)}, "`keys` must be finite"),
        ({"values": np.eye(3)}, r"`values` must be numbers of shape \(4, 3\)"),
        ({"values": np.full((4, 3), 0.5)}, "`values` must be a probability distribution"),
        ({"values": -np.eye(4)[:, :3]}, "`values` must be a probability distribution"),
        ({"values": np.full((4, 3), np.inf)}, "`values` must be finite"),
        ({"values": np.full((4, 3), "a")}, "`values` must be numbers"),
    ],
)
def test_bad_entries(arguments, message):
    dictionary = NeighborDictionary(4, 3)
    dictionary.build((None, 4))
    before = dictionary.get_weights()
    with pytest.raises(ValueError, match=message):
        dictionary.assign(**{"keys": X[:4], **arguments})
    for new, old in zip(dictionary.get_weights(), before, strict=True):
        np.testing.assert_array_equal(new, old)
