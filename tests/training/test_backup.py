"""Training goes on after a kill, with the numbers of one that nothing interrupted."""

import shutil

import keras
import numpy as np
import pytest
from helpers import IS_TENSORFLOW, assert_all_equal, normal

import nsl_keras
from nsl_keras.callbacks import TrainingBackup
from nsl_keras.training import backup

X, Y = normal(24, 6), (np.arange(24) % 3).astype("int32")


class Batches(keras.utils.PyDataset):
    """Batches whose order is a function of the epoch."""

    epoch = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        order = np.random.default_rng([1, self.epoch]).permutation(len(X))
        chosen = order[8 * index : 8 * (index + 1)]
        return X[chosen], Y[chosen]


class Killed(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


def dense_model(last=nsl_keras.layers.CosineDense, **options):
    """By default one of the weights is a number."""
    keras.utils.set_random_seed(3)
    dropout = keras.layers.Dropout(0.4, seed=1)
    model = keras.Sequential([keras.Input((6,)), dropout, last(3, **options)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.Adam(0.1), loss, metrics=["accuracy"], run_eagerly=IS_TENSORFLOW
    )
    return model


def fit(model, folder, killed_at=None, epochs=5, **options):
    """Trains with early stopping, and returns `History`."""
    data = Batches()
    stopping = keras.callbacks.EarlyStopping(
        monitor="loss", patience=2, min_delta=1e-3, restore_best_weights=True
    )
    backup = TrainingBackup(folder, data, [stopping], delete_at_end=False, **options)
    callbacks = [Killed(killed_at), stopping, backup]
    return model.fit(
        data, epochs=epochs, callbacks=callbacks, verbose=0, shuffle=False
    ), stopping


def assert_same(*models):
    assert_all_equal(*([*each.variables, *each.optimizer.variables] for each in models))


def states(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.jax
def test_a_killed_training_ends_as_an_uninterrupted_one(tmp_path):
    whole = dense_model()
    history, stopping = fit(whole, tmp_path / "whole")
    for killed_at in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            fit(dense_model(), tmp_path / "killed", killed_at)
    assert states(tmp_path / "killed") == ["epoch_2.state", "epoch_3.state"]
    model = dense_model()
    resumed, restored = fit(model, tmp_path / "killed")
    assert_same(model, whole)
    assert resumed.history == history.history
    assert resumed.epoch == history.epoch == list(range(5))
    for name in ("wait", "best", "best_epoch", "stopped_epoch", "min_delta"):
        assert getattr(restored, name) == getattr(stopping, name), name
    assert_all_equal(restored.best_weights, stopping.best_weights)
    # What is finished is not trained again.
    again = dense_model()
    finished, _ = fit(again, tmp_path / "killed")
    assert_same(again, whole)
    assert (finished.history, finished.epoch) == (history.history, history.epoch)
    # A call without the callback begins at its own first epoch, also after a kill.
    assert again.fit(X, Y, epochs=1, verbose=0).epoch == [0]
    with pytest.raises(KeyboardInterrupt):
        fit(again, tmp_path / "another", 2)
    assert again.fit(X, Y, epochs=1, verbose=0).epoch == [0]


@pytest.mark.jax
def test_a_training_that_stopped_stays_stopped(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    found = []
    for stops in ([Stop()], []):
        model = dense_model()
        backup = TrainingBackup(tmp_path / "states", every=3, delete_at_end=False)
        history = model.fit(X, Y, epochs=4, callbacks=[*stops, backup], verbose=0)
        found.append((history.epoch, history.history, model.get_weights()))
    assert found[0][:2] == found[1][:2]
    assert found[1][0] == [0, 1]
    assert_all_equal(found[0][2], found[1][2])
    backup.delete()
    assert not (tmp_path / "states").exists()


def test_other_processes_read_and_do_not_write(tmp_path, monkeypatch):
    whole, _ = fit(dense_model(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(dense_model(), tmp_path / "shared", killed_at=2)
    monkeypatch.setattr(backup, "is_first_process", lambda model: False)
    left = states(tmp_path / "shared")
    history, _ = fit(dense_model(), tmp_path / "shared")
    assert history.history == whole.history
    TrainingBackup(tmp_path / "shared")
    assert states(tmp_path / "shared") == left


def test_states_every_few_epochs(tmp_path):
    kept = []

    class Look(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            kept.append(states(tmp_path / "states")[-1])

    for delete_at_end in (False, True):
        backup = TrainingBackup(tmp_path / "states", None, (), 2, delete_at_end)
        dense_model().fit(X, Y, epochs=5, verbose=0, callbacks=[backup, Look()])
        if not delete_at_end:
            assert states(tmp_path / "states") == ["epoch_4.state", "epoch_5.state"]
            backup.delete()
        assert states(tmp_path) == []
    assert kept == [f"epoch_{number}.state" for number in (0, 0, 2, 2, 4)] * 2


@pytest.mark.parametrize("writes", [True, False])
def test_epoch_is_the_kept_one(tmp_path, monkeypatch, writes):
    monkeypatch.setattr(backup, "is_first_process", lambda model: writes)
    kept = TrainingBackup(tmp_path, every=3)
    with pytest.raises(KeyboardInterrupt):
        dense_model().fit(X, Y, epochs=9, verbose=0, callbacks=[Killed(5), kept])
    assert kept.epoch == 3
    assert TrainingBackup(tmp_path).epoch == (3 if writes else 0)


def test_what_comes_after_the_backup_is_refused(tmp_path):
    statistics = nsl_keras.callbacks.EntryStatistics(X)
    start = nsl_keras.callbacks.DictionaryInitializer(X, Y)
    model = neighborhoods()
    for late in (statistics, start):
        backup = TrainingBackup(tmp_path)
        with pytest.raises(ValueError, match="must have `TrainingBackup` after"):
            model.fit(X, Y, verbose=0, callbacks=[backup, late])


def test_damaged_states(tmp_path, monkeypatch):
    fit(dense_model(), tmp_path / "whole", epochs=3)
    newest = (tmp_path / "whole" / "epoch_3.state").read_bytes()
    one_bit = newest[:-200] + bytes([newest[-200] ^ 1]) + newest[-199:]
    for number, damaged in enumerate([b"", newest[: len(newest) // 2], one_bit]):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        (folder / "epoch_3.state").write_bytes(damaged)
        with pytest.warns(UserWarning, match=r"epoch_3.state is damaged: training cont"):
            kept = [
                TrainingBackup(folder, None, [keras.callbacks.Callback()], 1, False)
                for _ in range(3)
            ]
        assert [each.epoch for each in kept] == [2, 2, 2]
        assert (folder / "epoch_3.state").read_bytes() == damaged
    # The first process alone deletes the damaged state, unless it is gone.
    for each, writes in zip(kept, (False, True, True), strict=True):
        monkeypatch.setattr(backup, "is_first_process", lambda model, is_=writes: is_)
        dense_model().fit(X, Y, epochs=2, verbose=0, callbacks=[each])
        assert ("epoch_3.state" in states(folder)) is not writes
    (folder / "epoch_2.state").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"epoch_2.state is damaged"):
        assert TrainingBackup(folder).epoch == 0


def test_a_state_of_another_model(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(dense_model(), tmp_path, killed_at=1)
    backup = TrainingBackup(tmp_path)
    with pytest.raises(
        ValueError, match=r"`callbacks` must be those .* 0 callbacks, there 1"
    ):
        dense_model().fit(X, Y, callbacks=[backup], verbose=0)
    for units, dtype, message in (
        (4, "float32", r"there \[.*kernel', \[6, 3\].* here \[.*kernel', \[6, 4\]"),
        (3, "bfloat16", "'float32'.*'bfloat16'"),
    ):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.4, seed=1)])
        model.add(keras.layers.Dense(units, dtype=dtype))
        model.compile("adam", "sparse_categorical_crossentropy")
        with pytest.raises(ValueError, match=f"of this model, compiled .*{message}"):
            fit(model, tmp_path)
    model = dense_model()
    model.compile("sgd", model.loss)
    with pytest.raises(ValueError, match=r"there \[.*, here None"):
        fit(model, tmp_path)


class TwoOptimizers(keras.Sequential):
    def compile(self, *args, **kwargs):
        super().compile(*args, **kwargs)
        self.other_optimizer = keras.optimizers.Adam()
        self.other_optimizer.build(self.trainable_variables)


def test_a_second_optimizer(tmp_path):
    """Is restored, and must be built."""

    def made():
        model = TwoOptimizers([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    first, second = made(), made()
    first.other_optimizer.iterations.assign(7)
    for model, epochs in ((first, 1), (second, 2)):
        callbacks = [TrainingBackup(tmp_path, delete_at_end=False)]
        model.fit(X, X[:, :1], epochs=epochs, callbacks=callbacks, verbose=0, shuffle=False)
    assert int(second.other_optimizer.iterations) == 7
    second.other_optimizer = keras.optimizers.Adam()
    with pytest.raises(ValueError, match="Every optimizer of the model must be built"):
        second.fit(X, X[:, :1], callbacks=callbacks, verbose=0)


class Started(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        raise AssertionError("Training began.")


def test_no_room(tmp_path, monkeypatch):
    def begin(folder):
        callbacks = [TrainingBackup(folder), Started()]
        dense_model().fit(X, Y, callbacks=callbacks, verbose=0)

    fit(model := dense_model(), tmp_path / "kept", epochs=2)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        begin(tmp_path / "file" / "states")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"must have room for .* 1,000 bytes free"):
        begin(tmp_path / "states")
    with pytest.raises(OSError, match="must have room"):
        fit(model, tmp_path / "kept", epochs=4)
    # Without a backup, the next training begins at its own first epoch.
    assert model.fit(X, Y, epochs=3, verbose=0).epoch == [0, 1, 2]


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="Keras builds it in `fit`")
def test_a_model_that_is_not_built(tmp_path):
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile("adam", "mse", run_eagerly=IS_TENSORFLOW)
    backup = TrainingBackup(tmp_path / "states")
    with pytest.raises(ValueError, match=r"needs a built model.*Received: unbuilt"):
        model.fit(X, X[:, :3], callbacks=[backup], verbose=0)
    assert not (tmp_path / "states").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": [1]}, "`data` must have an attribute `epoch`.* Received: a list"),
        ({"every": 0}, "`every` must be a positive integer. Received: every=0"),
    ],
    ids=str,
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        TrainingBackup(**{"folder": "states", **arguments})


def check_killed(make, folder, inputs=None, data=lambda: None, callbacks=list):
    """Trains without and with a kill, with the same weights and history in the end."""
    found = []
    for kills in ((None,), (2, None)):
        for killed_at in kills:
            model, others = make(), callbacks()
            backup = TrainingBackup(folder / str(len(kills)), data(), others)
            given = inputs(backup) if inputs else {"x": X, "y": Y}
            options = {"epochs": 4, "shuffle": False, "verbose": 0}
            options["callbacks"] = [Killed(killed_at), *others, backup]
            try:
                history = model.fit(**given, **options)
            except KeyboardInterrupt:
                continue
        found.append((model, history.history))
    (whole, expected), (model, resumed) = found
    assert_same(model, whole)
    assert resumed == expected
    assert states(folder) == []


@pytest.mark.jax
def test_other_dtypes(tmp_path):
    """Seeds of 32 bits, weights in bfloat16."""
    check_killed(lambda: dense_model(keras.layers.Dense, dtype="bfloat16"), tmp_path)


def test_private_progress_of_callbacks(tmp_path):
    """Keras's callback swaps averages in at the end of an epoch, and back at the next."""

    def averaged():
        model = dense_model()
        model.compile(keras.optimizers.SGD(0.5, use_ema=True), model.loss)
        return model

    def swaps():
        return [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]

    check_killed(averaged, tmp_path, callbacks=swaps)


def neighborhoods():
    """Dictionary dropout, and metrics of the model's own."""
    keras.utils.set_random_seed(3)
    model = nsl_keras.MetaNeighborhoodModel(
        None, nsl_keras.layers.CosineDense(3), dictionary=20
    )
    model.build((None, 6))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


@pytest.mark.jax
@pytest.mark.long
def test_meta_neighborhoods(tmp_path):
    check_killed(neighborhoods, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", ["MAML", pytest.param("ProtoNet", marks=pytest.mark.jax)])
def test_few_shot_learners(tmp_path, name):
    def make():
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dropout(0.3, seed=0), keras.layers.Dense(3)]
        network = keras.Sequential([keras.Input((6,)), *layers])
        ways = {"ways": 3} if name == "ProtoNet" else {}
        learner = getattr(nsl_keras.few_shot, name)(network, **ways)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        learner.compile("adam", loss, run_eagerly=IS_TENSORFLOW and name == "ProtoNet")
        return learner

    def episodes():
        sampler = nsl_keras.few_shot.EpisodeSampler(X, np.arange(24) % 4, 3, 2, 2, seed=0)
        return sampler.batches(2, steps=2)

    check_killed(make, tmp_path, lambda backup: {"x": backup.data}, episodes)


@pytest.mark.long
def test_shuffled_data_sets(tmp_path):
    """The order of the docstring, shuffled by epoch."""
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((X, Y))

    def of_epoch(epoch):
        return data.shuffle(24, seed=epoch, reshuffle_each_iteration=False).batch(8)

    def inputs(backup):
        order = tf.data.Dataset.range(backup.epoch, 4).flat_map(of_epoch)
        return {"x": order, "steps_per_epoch": 3}

    check_killed(dense_model, tmp_path, inputs)
