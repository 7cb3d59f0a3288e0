"""What the callbacks log about a dictionary, and the projector's files, read back."""

import re

import keras
import numpy as np
import pytest
from keras import ops

import nsl_keras
from nsl_keras.callbacks import (
    DictionaryInitializer,
    EntryStatistics,
    NeighborProjector,
)

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


def test_entries_stay_where_no_first_epoch_is_trained():
    model = make_model()
    before = model.get_weights()
    start = DictionaryInitializer(X, Y, epochs=0)
    model.fit(X, Y, verbose=0, callbacks=[start], initial_epoch=3, epochs=3)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


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


def test_errors_of_the_initializer():
    with pytest.raises(ValueError, match=r"`epochs` must be.*=-1"):
        DictionaryInitializer(X, Y, epochs=-1)
    with pytest.raises(ValueError, match=r"same length.*len\(x\)=300, len\(y\)=2"):
        DictionaryInitializer(X, Y[:2])
    with pytest.raises(ValueError, match=r"`seed` must be.*='a'"):
        DictionaryInitializer(X, Y, seed="a")
    model = make_model()
    before = model.get_weights()
    with pytest.raises(ValueError, match="Received: 5 examples and 6 entries"):
        model.fit(X, Y, callbacks=[DictionaryInitializer(X[:5], Y[:5])], verbose=0)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    plain = keras.Sequential([keras.layers.Dense(3)])
    plain.compile(loss="mse")
    with pytest.raises(ValueError, match="`DictionaryInitializer` must be a callback of a"):
        plain.fit(X, np.zeros((300, 3)), callbacks=[DictionaryInitializer(X, Y)], verbose=0)


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


def test_extreme_statistics():
    """Equal attention, and attention that ignores all entries but one."""
    model = make_model(temperature=1e-3)
    keys = np.ones((ENTRIES, 5), "float32")
    model.dictionary.keys.assign(keys)
    _, found = measured(model, X)
    assert found["attention_entropy"] == pytest.approx(np.log(ENTRIES), rel=1e-5)
    assert found["usage_entropy"] == pytest.approx(np.log(ENTRIES), rel=1e-5)
    assert found["dead_entries"] == 0
    keys[1:] = -ops.convert_to_numpy(model.features(X[:1]))
    keys[0] = -keys[1]
    model.dictionary.keys.assign(keys)
    _, found = measured(model, X[:1])
    assert found["attention_entropy"] == pytest.approx(0, abs=1e-6)
    assert found["usage_entropy"] == pytest.approx(0, abs=1e-6)
    assert found["dead_entries"] == pytest.approx((ENTRIES - 1) / ENTRIES)


def test_fit_logs_the_statistics_of_each_epoch():
    callback = EntryStatistics(X[:50])
    _, history = fitted(callback, epochs=3)
    names = ("attention_entropy", "usage_entropy", "dead_entries")
    assert all(len(history[name]) == 3 for name in names)
    assert len(set(history["attention_entropy"])) == 3
    assert [history[name][-1] for name in names] == list(callback.measure().values())


def test_bad_arguments_of_the_statistics():
    with pytest.raises(ValueError, match="`dead_below` must be a finite number above zero"):
        EntryStatistics(X, dead_below=0)
    with pytest.raises(ValueError, match="`x` must hold at least one example"):
        EntryStatistics(X[:0])
    with pytest.raises(ValueError, match="`x` must be finite"):
        EntryStatistics(np.full((2, FEATURES), np.nan))


@pytest.mark.parametrize("callback", [EntryStatistics(X), NeighborProjector("unused")])
def test_other_models_are_refused(callback):
    plain = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(3)])
    plain.compile(loss="mse")
    with pytest.raises(ValueError, match=r"of a MetaNeighborhoodModel.*Sequential"):
        plain.fit(X, np.eye(3)[Y], callbacks=[callback], verbose=0)


# NeighborProjector.


def read(folder):
    """Vectors, header and rows, found by way of the configuration."""
    config = (folder / "projector_config.pbtxt").read_text()
    paths = dict(re.findall(r'(\w+_path): "(.*)"', config))
    vectors = np.loadtxt(folder / paths["tensor_path"], delimiter="\t", ndmin=2)
    lines = (folder / paths["metadata_path"]).read_text().splitlines()
    header, *rows = [line.split("\t") for line in lines]
    assert len(rows) == len(vectors)
    assert all(len(row) == len(header) for row in rows)
    return vectors, header, rows


def test_keys_after_each_epoch(tmp_path):
    seen = []

    class Reader(NeighborProjector):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            keys = ops.convert_to_numpy(self.model.dictionary.keys.value)
            seen.append((read(tmp_path / "logs")[0], keys.copy()))

    model, _ = fitted(Reader(tmp_path / "logs"), epochs=2)
    for vectors, keys in seen:
        np.testing.assert_allclose(vectors, keys, rtol=1e-6, atol=1e-9)
    (first, _), (second, _) = seen
    assert np.abs(first - second).max() > 1e-4
    _, header, rows = read(tmp_path / "logs")
    values = ops.convert_to_numpy(model.dictionary.values)
    assert header == ["kind", "number", "class", "probability"]
    assert rows == [
        ["entry", str(number), str(value.argmax()), f"{value.max():.3f}"]
        for number, value in enumerate(values)
    ]
    names = {path.name for path in (tmp_path / "logs").iterdir()}
    assert names == {"neighbors.tsv", "neighbors_metadata.tsv", "projector_config.pbtxt"}


def test_examples_and_names(tmp_path):
    names = ["ant", "bumble\tbee", "cat"]
    projector = NeighborProjector(str(tmp_path), X, Y, class_names=names)
    model, _ = fitted(projector)
    features = ops.convert_to_numpy(model.features(ops.convert_to_tensor(X)))
    shown = ["ant", "bumble bee", "cat"]
    for y in (Y, Y[:, None], np.eye(3)[Y]):
        projector.y = y
        projector.write()
        vectors, _, rows = read(tmp_path)
        np.testing.assert_allclose(vectors[ENTRIES:], features, rtol=1e-5, atol=1e-6)
        assert rows[ENTRIES:] == [
            ["example", str(number), shown[label], "1"] for number, label in enumerate(Y)
        ]


def test_values_of_a_regression(tmp_path):
    targets = RNG.normal(size=(20, 2))
    model, _ = fitted(NeighborProjector(tmp_path, X[:20], targets), "regression")
    vectors, header, rows = read(tmp_path)
    assert header == ["kind", "number", "value"]
    assert vectors.shape == (ENTRIES + 20, 5)
    found = np.array([[float(part) for part in row[2].split()] for row in rows])
    values = ops.convert_to_numpy(model.dictionary.values)
    expected = np.concatenate([values, targets])
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_bad_arguments_of_the_projector(tmp_path):
    with pytest.raises(ValueError, match=r"given together.*Received: `x` alone"):
        NeighborProjector(tmp_path, X)
    with pytest.raises(ValueError, match="Received: `y` alone"):
        NeighborProjector(tmp_path, y=Y)
    with pytest.raises(ValueError, match="`x` and `y` must have the same length"):
        NeighborProjector(tmp_path, X, Y[:3])
    for projector, message in (
        (NeighborProjector(tmp_path, X, Y + 1), "`y` must hold classes 0 to 2"),
        (NeighborProjector(tmp_path, class_names="ab"), "`class_names` must hold 3"),
    ):
        projector.set_model(make_model())
        with pytest.raises(ValueError, match=message):
            projector.write()


# Data in other forms.


def test_callbacks_read_data_sets_and_several_inputs(tmp_path):
    def batches():
        return ((X[start : start + 100], Y[start : start + 100]) for start in (0, 100, 200))

    statistics = EntryStatistics(X), EntryStatistics(batches())
    start = DictionaryInitializer(batches(), epochs=0, seed=1)
    projectors = [
        NeighborProjector(tmp_path / "arrays", X, Y),
        NeighborProjector(tmp_path / "batches", batches()),
    ]
    make_model().fit(X, Y, verbose=0, callbacks=[start, *statistics, *projectors])
    np.testing.assert_allclose(statistics[0].usage, statistics[1].usage, rtol=1e-5)
    for name in ("neighbors.tsv", "neighbors_metadata.tsv"):
        one, other = (
            (tmp_path / each / name).read_text() for each in ("arrays", "batches")
        )
        assert one == other
    with pytest.raises(ValueError, match=r"`y` must be given, or come with the data set"):
        DictionaryInitializer(iter([X]))
