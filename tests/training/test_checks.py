"""What `fit` refuses beforehand, where it stops, and what a loss may leave out."""

import keras
import numpy as np
import pytest
from helpers import Batches
from keras import ops

import nsl_keras
from nsl_keras import few_shot
from nsl_keras.training import checks

LONG = pytest.mark.long
X = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
Y = np.arange(24) % 3


def with_nan():
    """Six batches, a NaN in the third, as no check of arrays sees it."""
    x = np.where(np.arange(X.size).reshape(X.shape) == 50, np.nan, X)
    return Batches(*zip(np.split(x, 6), np.split(Y, 6), strict=True))


def classifier(**options):
    model = nsl_keras.MetaNeighborhoodModel(
        None, nsl_keras.layers.CosineDense(3), dictionary=6
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)
    model.build((None, 6))
    model.compile("sgd", loss)
    return model


@pytest.mark.jax
def test_a_nan_stops_fit_before_a_backup_is_written(tmp_path):
    callbacks = keras.callbacks.CallbackList([checks.StopAtNonFiniteLoss()])
    if keras.backend.backend() == "jax":  # Else Keras would wait for each batch.
        assert callbacks._async_train
    backup = nsl_keras.callbacks.TrainingBackup(tmp_path)
    with pytest.raises(nsl_keras.NonFiniteLossError, match=r"became nan by batch [3-6] of"):
        classifier().fit(with_nan(), shuffle=False, verbose=0, callbacks=backup)
    assert not any(tmp_path.iterdir())


def test_a_gentle_stop_is_gentle():
    ended = []
    callbacks = [
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.LambdaCallback(on_train_end=lambda logs: ended.append(logs)),
    ]
    history = classifier().fit(
        with_nan(), shuffle=False, epochs=3, verbose=0, callbacks=callbacks
    )
    assert np.isnan(history.history["loss"]).tolist() == [True] and len(ended) == 1


@pytest.mark.usefixtures("eager")
def test_arguments_by_position():
    """As Keras orders them: callbacks are the sixth, validation data the eighth."""
    model, seen = classifier(), []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(1))
    model.fit(X, Y, 8, 2, 0, [callback])
    assert len(seen) == 2
    with pytest.raises(ValueError, match="must hold classes 0 to 2"):
        model.fit(X, Y, 8, 1, 0, None, 0.0, (X, Y + 1))
    with pytest.raises(ValueError, match="must hold classes 0 to 2"):
        model.fit(X, Y + 1, 8, 1, 0)


@pytest.mark.usefixtures("eager")
def test_the_first_batch_of_a_data_set_is_checked():
    model, seen = classifier(), []
    options = {"steps_per_epoch": 3, "shuffle": False, "verbose": 0}
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: seen.append(1)
    )
    model.fit((batch for batch in [(X, Y)] * 3), callbacks=note, **options)
    assert len(seen) == 3
    for use in (
        lambda wrong: model.fit((batch for batch in [wrong]), shuffle=False),
        lambda wrong: model.fit(X, Y, validation_data=Batches(wrong), verbose=0),
        lambda wrong: model.evaluate(Batches(wrong), verbose=0),
    ):
        with pytest.raises(ValueError, match="must hold classes 0 to 2"):
            use((X, Y + 1))


@pytest.mark.usefixtures("eager")
def test_targets_that_the_loss_leaves_out_are_not_checked():
    model = classifier(ignore_class=-1)
    labels = np.where(Y == 2, -1, Y)
    model.compile("sgd", [model.loss])
    model.fit(X, labels, validation_data=(X, labels), verbose=0)
    with pytest.raises(ValueError, match=r"must hold classes 0 to 2.*: 7"):
        model.evaluate(X, np.where(Y == 2, 7, Y), verbose=0)


def test_targets_of_zero_weight_are_checked():
    """The weight does not keep a label outside the classes out of the loss."""
    labels = np.where(np.arange(24) == 5, -1, Y)
    weights = (labels >= 0).astype("float32")
    with pytest.raises(ValueError, match=r"must hold classes 0 to 2.*: -1"):
        classifier().fit(X, labels, sample_weight=weights, verbose=0)


def test_losses_of_probabilities():
    logits = keras.losses.CategoricalCrossentropy(from_logits=True)
    for loss in (
        "categorical_crossentropy",
        keras.losses.SparseCategoricalCrossentropy(),
        keras.losses.sparse_categorical_crossentropy,
        [logits, "binary_crossentropy"],
    ):
        with pytest.raises(ValueError, match="`loss` must take logits"):
            checks.loss_of_logits(loss)

    for loss in (None, "mse", logits, lambda y_true, y_pred: ops.mean(y_pred)):
        checks.loss_of_logits(loss)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="A tool of TensorFlow")
@pytest.mark.parametrize(
    "kind", ["proto_net", *(pytest.param(k, marks=LONG) for k in ("neighbors", "maml"))]
)
def test_no_graph_holds_a_nan(kind):
    import tensorflow as tf

    if kind == "neighbors":
        model, x, y = classifier(), X, Y
    else:
        network = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        kinds = {"proto_net": few_shot.ProtoNet, "maml": few_shot.MAML}
        model = kinds[kind](network, **({"ways": 3} if kind == "proto_net" else {}))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        images, labels = X.reshape(4, 6, 6), Y.reshape(4, 6)
        x, y = (images, labels, images), labels
    tf.debugging.enable_check_numerics()
    try:
        model.fit(x, y, verbose=0)
        model.predict(x, verbose=0)
    finally:
        tf.debugging.disable_check_numerics()
