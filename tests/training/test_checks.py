"""What `fit` refuses beforehand, where it stops, and what a loss may leave out."""

import inspect

import keras
import numpy as np
import pytest
from helpers import Batches, refused
from keras import ops

import nsl_keras
from nsl_keras.training import checks

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
    with pytest.raises(nsl_keras.NonFiniteLossError, match="of epoch 3"):
        classifier().fit(with_nan(), shuffle=False, verbose=0, initial_epoch=2, epochs=3)


def test_a_gentle_stop_is_gentle(eager):
    ended = []
    callbacks = [
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.LambdaCallback(on_train_end=lambda logs: ended.append(logs)),
    ]
    options = {"shuffle": False, "epochs": 3, "verbose": 0, "callbacks": callbacks}
    history = classifier().fit(with_nan(), **options)
    assert np.isnan(history.history["loss"]).tolist() == [True] and len(ended) == 1


def test_arguments_by_position(eager):
    """As Keras orders them: callbacks are the sixth, validation data the eighth."""
    model, history = classifier(), keras.callbacks.History()
    model.fit(X, Y, 24, 2, 0, [history])
    assert history.epoch == [0, 1]
    with refused("must hold classes 0 to 2"):
        model.fit(X, Y, 8, 1, 0, None, 0.0, (X, Y + 1))


def test_the_first_batch_of_a_data_set_is_checked(eager):
    model = classifier()
    model.fit(Batches((X, Y)), verbose=0)
    for use in (
        lambda wrong: model.fit(Batches(wrong), verbose=0),
        lambda wrong: model.fit(X, Y, validation_data=Batches(wrong), verbose=0),
        lambda wrong: model.evaluate(Batches(wrong), verbose=0),
    ):
        with refused("must hold classes 0 to 2"):
            use((X, Y + 1))
    assert model.optimizer.iterations == 1  # All before the first step.


def test_targets_that_the_loss_leaves_out_are_not_checked(eager):
    model = classifier(ignore_class=-1)
    labels = np.where(Y == 2, -1, Y)
    model.compile("sgd", [model.loss])
    model.fit(X, labels, validation_data=(X, labels), verbose=0)
    # A weight of zero does not keep a label outside the classes out of the loss.
    wrong, weights = np.where(Y == 2, 7, Y), (Y != 2).astype("float32")
    with refused(r"must hold classes 0 to 2.*: 7"):
        model.fit(X, wrong, sample_weight=weights, verbose=0)


def kerass_losses():
    """Every loss of Keras, and whether it says that it takes logits; `None` if neither."""
    for loss in vars(keras.losses).values():
        parameters = inspect.signature(loss).parameters if callable(loss) else {}
        if inspect.isclass(loss) and loss is not keras.losses.Loss:
            given = {"q": 0.5} if "q" in parameters else {}
            if "from_logits" in parameters:
                for value in (False, True):
                    yield loss(from_logits=value), value
            else:
                yield loss(**given), None
        elif [*parameters][:2] == ["y_true", "y_pred"]:
            yield loss, False if "from_logits" in parameters else None


@pytest.mark.jax
def test_every_loss_of_keras_is_one_of_logits_or_refused():
    """A loss of the softmax's logits forgets a constant that is added to each row."""
    shift = np.array([[1.5], [-2.0]], "float32")
    seen = set()
    for loss, says in kerass_losses():
        name = getattr(loss, "__name__", type(loss).__name__).lower().replace("_", "")
        seen.add(name)
        if not says:
            with refused("`loss` must take logits"):
                checks.require_logits_loss(loss)
            continue
        checks.require_logits_loss(loss)
        labels = np.array([1, 0]) if "sparse" in name else np.eye(3)[[1, 0]]
        one, other = (loss(labels, X[:2, :3] + added) for added in (0, shift))
        is_softmax = not name.startswith("binary")
        assert np.allclose(one, other, atol=1e-5) == is_softmax, name
    assert {"hinge", "kldivergence", "poisson", "dice", "tversky", "ctc"} <= seen


def test_losses_by_name_in_lists_and_of_others():
    logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    for loss in ("kld", "sparse_categorical_crossentropy", "mse", [logits, "poisson"]):
        with refused(r"`loss` must take logits.*loss="):
            checks.require_logits_loss(loss)
    for loss in (None, logits, lambda y_true, y_pred: ops.mean(y_pred)):
        checks.require_logits_loss(loss)
