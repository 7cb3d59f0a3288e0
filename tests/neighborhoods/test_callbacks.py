"""Dictionaries that start from examples during `fit`."""

import keras
import numpy as np
import pytest
from helpers import CROSS_ENTROPY, as_numpy, assert_equal, normal, refusing, stacked

import nsl_keras
from nsl_keras.callbacks import DictionaryInitializer

ENTRIES = 6
FEW = normal(24, 4), np.random.default_rng(0).integers(0, 3, size=24)


def make_model(task="classification"):
    outputs, loss = (2, "mse") if task == "regression" else (3, CROSS_ENTROPY)
    backbone, head = stacked((4,), keras.layers.Dense(5)), keras.layers.Dense(outputs)
    model = nsl_keras.MetaNeighborhoodModel(backbone, head, ENTRIES, task=task)
    model.build((None, 4))
    model.compile(keras.optimizers.Adam(0.1), loss, run_eagerly=True)  # No long tracing.
    return model


@pytest.mark.parametrize(
    ("epochs", "task"), [(0, "classification"), (1, "regression"), (2, "classification")]
)
def test_entries_become_examples_after_so_many_epochs(epochs, task):
    """Examples of a data set too."""
    x, y = FEW[0], normal(24, 2) if task == "regression" else FEW[1]
    moments = []

    class Keys(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            features = as_numpy(self.model.features(x))
            keys = as_numpy(self.model.dictionary.keys)
            distances = np.linalg.norm(keys[:, None] - features[None], axis=-1).min(axis=1)
            moments.append(bool(distances.max() < 1e-5))

    given = (x, y) if epochs else (iter([(x[:9], y[:9]), (x[9:], y[9:])]), None)
    callbacks = [DictionaryInitializer(*given, epochs, seed=1), Keys()]
    make_model(task).fit(x, y, epochs=3, verbose=0, callbacks=callbacks)
    assert moments == [epoch == epochs for epoch in range(3)]


def test_entries_stay_where_training_is_resumed(tmp_path):
    starts = []

    class Killed(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            starts.append(self.model.get_weights())
            if epoch == 1:
                raise KeyboardInterrupt

    for _ in range(2):
        backup = keras.callbacks.BackupAndRestore(tmp_path)
        start = DictionaryInitializer(*FEW, epochs=0)
        with pytest.raises(KeyboardInterrupt):
            make_model().fit(*FEW, verbose=0, epochs=3, callbacks=[backup, start, Killed()])
    assert len(starts) == 3  # The second training begins with the second epoch.
    np.testing.assert_equal(starts[2], starts[1])


def test_entries_stay_in_a_second_fit():
    model, start = make_model(), DictionaryInitializer(*FEW, epochs=0, seed=1)
    model.fit(*FEW, verbose=0, callbacks=[start])
    model.optimizer.learning_rate = 0.0
    trained = as_numpy(model.dictionary.keys) + 0.1
    model.dictionary.keys.assign(trained)
    model.fit(*FEW, verbose=0, callbacks=[start])
    assert_equal(model.dictionary.keys, trained)


test_errors = refusing(
    (lambda: DictionaryInitializer(*FEW, epochs=-1), r"`epochs` must be.*=-1"),
    (lambda: DictionaryInitializer(*FEW, seed="a"), r"`seed` must be.*='a'"),
    (
        lambda: make_model().fit(*FEW, callbacks=[DictionaryInitializer(*FEW)], verbose=0),
        "`epochs` must be less than the 1 epochs",
    ),
)
