"""What the callback logs about the use of a dictionary."""

import keras
import numpy as np
import pytest

import nsl_keras
from nsl_keras.callbacks import EntryStatistics

ENTRIES, FEATURES = 6, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, FEATURES)).astype("float32")
Y = np.arange(300) % 3


def make_model(**options):
    model = nsl_keras.MetaNeighborhoodModel(
        None,
        nsl_keras.layers.CosineDense(3),
        nsl_keras.layers.NeighborDictionary(ENTRIES, seed=0, **options),
    )
    model.build((None, FEATURES))
    model.compile(
        optimizer=keras.optimizers.Adam(0.1),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def measured(model, x, **options):
    callback = EntryStatistics(x, **options)
    callback.set_model(model)
    return callback, callback.measure()


def test_against_the_definitions():
    """More examples than a batch holds, and a last batch that is not full."""
    model = make_model(temperature=0.3)
    callback, found = measured(model, X, dead_below=0.9)
    keys = np.array(model.neighborhood.dictionary.keys.value, "float64")
    cosines = (X @ keys.T) / np.linalg.norm(X, axis=1)[:, None]
    weights = np.exp(cosines / np.linalg.norm(keys, axis=1) / 0.3)
    weights /= weights.sum(axis=1, keepdims=True)
    usage = weights.mean(axis=0)
    np.testing.assert_allclose(callback.usage, usage, rtol=1e-4)
    entropies = -(weights * np.log(weights)).sum(axis=1)
    assert found["attention_entropy"] == pytest.approx(entropies.mean(), rel=1e-4)
    assert found["usage_entropy"] == pytest.approx(-(usage * np.log(usage)).sum(), rel=1e-4)
    assert found["dead_entries"] == np.mean(usage < 0.9 / ENTRIES)
    assert 0 < found["dead_entries"] < 1


def test_extremes():
    """Equal attention, and attention that ignores all entries but two."""
    model = make_model(temperature=1e-3)
    keys = np.zeros((ENTRIES, FEATURES), "float32")
    keys[:, 0] = 1
    model.neighborhood.dictionary.keys.assign(keys)
    _, found = measured(model, X)
    assert found["attention_entropy"] == pytest.approx(np.log(ENTRIES), rel=1e-5)
    assert found["usage_entropy"] == pytest.approx(np.log(ENTRIES), rel=1e-5)
    assert found["dead_entries"] == 0
    keys[:, 0] = 0
    keys[:, 1] = 1
    keys[:2] = np.eye(2, FEATURES)
    keys[1] = [-1, 0, 0, 0]
    model.neighborhood.dictionary.keys.assign(keys)
    two = np.eye(2, FEATURES, dtype="float32")
    two[1] = [-1, 0, 0, 0]
    _, found = measured(model, two)
    assert found["attention_entropy"] == pytest.approx(0, abs=1e-6)
    assert found["usage_entropy"] == pytest.approx(np.log(2), rel=1e-5)
    assert found["dead_entries"] == pytest.approx((ENTRIES - 2) / ENTRIES)


def test_fit_logs_the_weights_of_each_epoch():
    model = make_model()
    callback = EntryStatistics(X[:50])
    history = model.fit(X, Y, epochs=3, callbacks=[callback], verbose=0).history
    names = ("attention_entropy", "usage_entropy", "dead_entries")
    assert all(len(history[name]) == 3 for name in names)
    assert len(set(history["attention_entropy"])) == 3
    assert [history[name][-1] for name in names] == list(callback.measure().values())


def test_bad_arguments():
    with pytest.raises(ValueError, match="`dead_below` must be a finite number above zero"):
        EntryStatistics(X, dead_below=0)
    with pytest.raises(ValueError, match="`x` must hold at least one example"):
        EntryStatistics(X[:0])
    with pytest.raises(ValueError, match="`x` must"):
        EntryStatistics(np.full((2, FEATURES), np.nan))
    plain = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    plain.compile(loss="mse")
    with pytest.raises(ValueError, match="must be a callback of a MetaNeighborhoodModel"):
        plain.fit(X, np.zeros((300, 3)), callbacks=[EntryStatistics(X)], verbose=0)
