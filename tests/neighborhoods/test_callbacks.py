"""Dictionaries that start from examples, and logs of how they are used."""

import keras
import numpy as np
import pytest
from keras import ops

import nsl_keras
from nsl_keras.callbacks import DictionaryInitializer, EntryStatistics

ENTRIES, FEATURES = 6, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, FEATURES)).astype("float32")
Y = RNG.integers(0, 3, size=300)


def make_model(task="classification", **options):
    regression = task == "regression"
    model = nsl_keras.MetaNeighborhoodModel(
        keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(5)]),
        keras.layers.Dense(2 if regression else 3),
        nsl_keras.layers.NeighborDictionary(ENTRIES, seed=0, **options),
        task=task,
    )
    model.build((None, FEATURES))
    logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = "mse" if regression else logits
    model.compile(keras.optimizers.Adam(0.1), loss, run_eagerly=True)  # No long tracing.
    return model


def fitted(callback, task="classification", epochs=1):
    """A model after training with a callback, and its history."""
    model = make_model(task)
    y = RNG.normal(size=(300, 2)) if task == "regression" else Y
    history = model.fit(X, y, epochs=epochs, verbose=0, callbacks=[callback]).history
    return model, history


# DictionaryInitializer.


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_entries_become_examples_after_so_many_epochs(epochs, task):
    y = RNG.normal(size=(300, 2)) if task == "regression" else Y
    moments = []

    class Keys(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            features = ops.convert_to_numpy(self.model.features(X))
            keys = np.array(self.model.dictionary.keys.value)
            distances = np.linalg.norm(keys[:, None] - features[None], axis=-1).min(axis=1)
            moments.append(bool(distances.max() < 1e-5))

    model = make_model(task)
    callbacks = [DictionaryInitializer(X, y, epochs, seed=1), Keys()]
    model.fit(X, y, epochs=3, verbose=0, callbacks=callbacks)
    assert moments == [epoch == epochs for epoch in range(3)]


def test_entries_stay_where_training_is_resumed(tmp_path):
    ends, starts = [], []

    class Killed(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            starts.append(self.model.get_weights())
            if epoch == 1:
                raise KeyboardInterrupt

        def on_epoch_end(self, epoch, logs=None):
            ends.append(self.model.get_weights())

    for _ in range(2):
        backup = keras.callbacks.BackupAndRestore(tmp_path)
        start = DictionaryInitializer(X, Y, epochs=0)
        with pytest.raises(KeyboardInterrupt):
            make_model().fit(X, Y, verbose=0, epochs=3, callbacks=[backup, start, Killed()])
    assert len(ends) == 1
    for one, other in zip(starts[-1], ends[0], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("epochs", [0, 1])
def test_entries_stay_in_a_second_fit(epochs):
    model, start = make_model(), DictionaryInitializer(X, Y, epochs, seed=1)
    model.fit(X, Y, verbose=0, callbacks=[start])
    model.optimizer.learning_rate = 0.0
    trained = np.array(model.dictionary.keys.value) + 0.1
    model.dictionary.keys.assign(trained)
    model.fit(X, Y, verbose=0, callbacks=[start])
    np.testing.assert_array_equal(model.dictionary.keys.value, trained)
    other = make_model()  # Another model's entries are set by the same callback.
    before = np.array(other.dictionary.keys.value)
    other.optimizer.learning_rate = 0.0
    other.fit(X, Y, verbose=0, callbacks=[start])
    assert np.abs(np.array(other.dictionary.keys.value) - before).min() > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DictionaryInitializer(X, Y, epochs=-1), r"`epochs` must be.*=-1"),
        (lambda: DictionaryInitializer(X, Y, seed="a"), r"`seed` must be.*='a'"),
        (lambda: EntryStatistics(X, dead_below=0), "`dead_below` must be a finite number"),
        (lambda: EntryStatistics(np.full((2, 4), np.nan)), "`x` must be finite"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X[:5], Y[:5], "5 examples, num_neighbors=6"),
        (X, Y[:2], "300 examples and len.y.=2"),
        (X, None, "`y` must be given"),
    ],
)
def test_examples_that_cannot_be_entries(x, y, message):
    with pytest.raises(ValueError, match=message):
        make_model().fit(X, Y, callbacks=[DictionaryInitializer(x, y, 0)], verbose=0)


# EntryStatistics.


def measured(model, x, **options):
    callback = EntryStatistics(x, **options)
    callback.set_model(model)
    return callback, callback.measure()


def test_statistics_against_their_definitions():
    """More examples than a batch holds, and a last batch that is not full."""
    model = make_model(temperature=0.3)
    callback, found = measured(model, X, dead_below=0.9)
    keys = np.array(model.dictionary.keys.value, "float64")
    z = ops.convert_to_numpy(model.features(X))
    cosines = (z @ keys.T) / np.linalg.norm(z, axis=1)[:, None]
    weights = np.exp(cosines / np.linalg.norm(keys, axis=1) / 0.3)
    weights /= weights.sum(axis=1, keepdims=True)
    usage = weights.mean(axis=0)
    np.testing.assert_allclose(callback.usage, usage, rtol=1e-4)
    entropies = -(weights * np.log(weights)).sum(axis=1)
    assert found["attention_entropy"] == pytest.approx(entropies.mean(), rel=1e-4)
    assert found["usage_entropy"] == pytest.approx(-(usage * np.log(usage)).sum(), rel=1e-4)
    assert found["dead_entries"] == np.mean(usage < 0.9 / ENTRIES)
    assert 0 < found["dead_entries"] < 1


def test_fit_logs_the_statistics_of_each_epoch():
    callback = EntryStatistics(X[:50])
    _, history = fitted(callback, epochs=3)
    names = ("attention_entropy", "usage_entropy", "dead_entries")
    assert all(len(history[name]) == 3 for name in names)
    assert len(set(history["attention_entropy"])) == 3
    assert [history[name][-1] for name in names] == list(callback.measure().values())


@pytest.mark.parametrize("callback", [EntryStatistics(X), DictionaryInitializer(X, Y)])
def test_other_models_are_refused(callback):
    plain = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    plain.compile(loss="mse", run_eagerly=True)
    with pytest.raises(ValueError, match=r"of a MetaNeighborhoodModel.*Sequential"):
        plain.fit(X, np.eye(3)[Y], callbacks=[callback], verbose=0)


def test_callbacks_read_data_sets():
    def batches():
        return ((X[start : start + 100], Y[start : start + 100]) for start in (0, 100, 200))

    statistics = EntryStatistics(X), EntryStatistics(batches())
    start = DictionaryInitializer(batches(), epochs=0, seed=1)
    make_model().fit(X, Y, verbose=0, callbacks=[start, *statistics])
    np.testing.assert_allclose(statistics[0].usage, statistics[1].usage, rtol=1e-5)
