"""Training goes on after a kill, with the numbers of one that nothing interrupted."""

import functools
import re

import keras
import numpy as np
import pytest
from helpers import CROSS_ENTROPY, IS_TENSORFLOW, assert_all_equal, normal, refused

import nsl_keras
from nsl_keras.callbacks import TrainingBackup

X, Y = normal(24, 6), (np.arange(24) % 3).astype("int32")


def killing(at):
    def kill(epoch, logs):
        if epoch == at:
            raise KeyboardInterrupt

    return keras.callbacks.LambdaCallback(on_epoch_begin=kill)


class Counting(keras.callbacks.Callback):
    """Progress in a dict, changed at the end of an epoch, late in the list."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def on_epoch_end(self, epoch, logs=None):
        self.seen[epoch] = self.model.get_weights()[0].sum()
        logs["seen"] = len(self.seen)


def compiled(model):
    options = {"metrics": ["accuracy"], "run_eagerly": IS_TENSORFLOW}
    model.compile(keras.optimizers.Adam(0.1), CROSS_ENTROPY, **options)
    return model


def dense_model(**options):
    """One of the weights is a number."""
    keras.utils.set_random_seed(3)
    layers = keras.layers.Dropout(0.4, seed=1), nsl_keras.layers.CosineDense(3, **options)
    return compiled(keras.Sequential([keras.Input((6,)), *layers]))


def fit(model, folder, killed_at=None, others=(), inputs=None, **options):
    backup = TrainingBackup(folder, others, **options)
    given = inputs(backup) if inputs else {"x": X, "y": Y}
    callbacks = [backup, *others, killing(killed_at)]
    return model.fit(**given, epochs=5, callbacks=callbacks, verbose=0, shuffle=False)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def check_killed(make, folder, others=list, **options):
    """Trains without and with kills, with the same weights and history in the end."""
    whole, model = make(), make()
    expected = fit(whole, folder / "whole", others=others(), **options)
    for killed_at in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            fit(make(), folder / "killed", killed_at, others(), **options)
    assert names(folder / "killed") == ["epoch_3"]
    resumed = fit(model, folder / "killed", others=others(), **options)
    assert_all_equal(*([*m.variables, *m.optimizer.variables] for m in (model, whole)))
    assert (resumed.history, resumed.epoch) == (expected.history, expected.epoch)
    assert names(folder) == []
    return model


@pytest.mark.jax
def test_a_killed_training_ends_as_an_uninterrupted_one(tmp_path):
    """`Counting` writes logs and a dict; not every format of arrays holds bfloat16."""
    make = functools.partial(dense_model, dtype="bfloat16")
    model = check_killed(make, tmp_path, lambda: [Counting()])
    # A call without the callback begins at its own first epoch.
    assert model.fit(X, Y, epochs=1, verbose=0).epoch == [0]


@pytest.mark.jax
def test_early_stopping(tmp_path):
    """A training that stopped early is restored, and not trained further."""

    def stopping():
        options = {"patience": 2, "min_delta": 1e9, "restore_best_weights": True}
        return keras.callbacks.EarlyStopping("loss", **options)

    found = []
    with pytest.raises(KeyboardInterrupt):
        fit(dense_model(), tmp_path / "killed", 2, [stopping()])
    for folder in ("whole", "killed", "killed"):
        model, progress = dense_model(), stopping()
        history = fit(model, tmp_path / folder, None, [progress], delete_checkpoint=False)
        found.append((model, history, progress))
    assert names(tmp_path / "killed") == ["epoch_3"]
    (whole, expected, progress), *others = found
    for model, history, restored in others:
        assert_all_equal(whole.get_weights(), model.get_weights())
        assert (history.history, history.epoch) == (expected.history, [0, 1, 2])
        assert_all_equal(restored.best_weights, progress.best_weights)
        for name in ("wait", "best", "best_epoch", "stopped_epoch"):
            assert getattr(restored, name) == getattr(progress, name), name


def test_states_every_few_epochs(tmp_path):
    kept = []
    look = keras.callbacks.LambdaCallback(lambda *_: kept.append(names(tmp_path)))
    mine = [".scratch-1", "epoch_best"]
    for name in mine:
        (tmp_path / name).mkdir()
    (tmp_path / ".epoch_of_a_kill").mkdir()
    fit(dense_model(), tmp_path, others=[look], every=2)
    numbers = [re.findall(r"epoch_(\d)", " ".join(each)) for each in kept]
    assert numbers == [[], [], ["2"], ["2"], ["4"]]
    assert names(tmp_path) == mine


def test_processes_that_share_a_folder(tmp_path):
    """The second finds the state of the first in its place, and leaves it there."""
    with pytest.raises(KeyboardInterrupt):
        fit(dense_model(), tmp_path, killed_at=2)
    late = TrainingBackup(tmp_path)
    late.set_model(dense_model())
    late.on_train_begin()
    with pytest.raises(KeyboardInterrupt):
        fit(dense_model(), tmp_path, killed_at=3)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    late.model.history = keras.callbacks.History()
    late.on_epoch_begin(2)
    late.on_epoch_begin(3)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == written
    late.folder = tmp_path / "missing"
    with pytest.raises(FileNotFoundError):
        late.on_epoch_begin(4)


def test_a_training_that_starts_late_keeps_its_end(tmp_path):
    backup = TrainingBackup(tmp_path, delete_checkpoint=False)
    dense_model().fit(X, Y, initial_epoch=3, epochs=5, callbacks=backup, verbose=0)
    assert names(tmp_path) == ["epoch_5"]


def test_a_state_of_another_training(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(dense_model(), tmp_path, killed_at=1)
    with refused(r"`len\(callbacks\)` must be 0.*\)=1"):
        fit(dense_model(), tmp_path, others=[Counting()])
    more = keras.Sequential([dense_model(), keras.layers.Dropout(0.1)])
    more.compile("adam", "mse")
    with refused(r"`len\(seeds\)` must be 1.*\)=2"):
        fit(more, tmp_path)
    assert names(tmp_path) == ["epoch_1"]


def test_bad_arguments(tmp_path):
    with refused("`every` must be a positive integer"):
        TrainingBackup("states", every=0)
    with refused("must be on this machine"):
        TrainingBackup("gs://bucket/states")
    # Not after the first epoch, whose work would be lost.
    log, model = keras.callbacks.CSVLogger(tmp_path / "log.csv"), dense_model()
    with refused(r"`callbacks` must hold .*CSVLogger"):
        fit(model, tmp_path / "states", others=[log])
    assert model.optimizer.iterations == 0 and not (tmp_path / "states").exists()
    log.csv_file.close()


def test_private_progress_of_callbacks(tmp_path):
    """Keras's callback swaps averages in at the end of an epoch, and back at the next."""

    def averaged():
        model = dense_model()
        optimizer = keras.optimizers.SGD(0.5, use_ema=True)
        model.compile(optimizer, model.loss, run_eagerly=IS_TENSORFLOW)
        return model

    check_killed(averaged, tmp_path, lambda: [keras.callbacks.SwapEMAWeights(True)])


@pytest.mark.jax
@pytest.mark.long
def test_few_shot_learners(tmp_path):
    def make():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dropout(0.3, seed=0), keras.layers.Dense(3)]
        network = keras.Sequential([keras.Input((6,)), *layers])
        return compiled(nsl_keras.few_shot.ProtoNet(network, ways=3))

    def episodes(backup):
        sampler = nsl_keras.few_shot.EpisodeSampler(X, np.arange(24) % 4, 3, 2, 2, seed=0)
        batches = sampler.batches(2, steps=2)
        batches.epoch = backup.epoch
        return {"x": batches}

    check_killed(make, tmp_path, inputs=episodes)
