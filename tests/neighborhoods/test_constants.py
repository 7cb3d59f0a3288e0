"""What inference computes once, and that it is never out of date."""

import keras
import numpy as np
import pytest
from helpers import CROSS_ENTROPY, IS_TENSORFLOW, as_numpy, assert_close, normal, stacked

import nsl_keras
from nsl_keras.layers import CosineDense, NeighborDictionary
from nsl_keras.neighborhoods.dual_form import DualForm

X, Y = normal(20, 4), np.arange(20) % 3


def make_model(head=None, kind=nsl_keras.MetaNeighborhoodModel, **options):
    backbone = stacked((4,), keras.layers.Dense(5))
    options = {"inner_learning_rate": 2.0, **options}
    dictionary = NeighborDictionary(9, dropout=0.0)
    model = kind(backbone, head or keras.layers.Dense(3), dictionary, **options)
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)
    model.compile(optimizer, CROSS_ENTROPY)
    model.build(X.shape)
    optimizer.build(model.trainable_variables)
    return model


@pytest.fixture
def counted(monkeypatch):
    """The calls that compute constants, in traces too."""
    calls, traces = [], DualForm._traces

    def counting(self, stages, entries):
        calls.append(entries)
        return traces(self, stages, entries)

    monkeypatch.setattr(DualForm, "_traces", counting)
    return calls


def check_uses(model):
    """All ways to predict agree with a direct call."""
    expected = as_numpy(model(X))
    assert np.abs(expected - as_numpy(model(X, adapt=False))).max() > 1e-3
    assert_close(model.predict(X, batch_size=8, verbose=0), expected, 1e-4)
    assert_close(model.predict_on_batch(X), expected, 1e-4)
    assert_close(model.neighbors(X, k=2).after, expected, 1e-4)
    loss = float(CROSS_ENTROPY(Y, expected))
    for found in (model.evaluate(X, Y, verbose=0), model.test_on_batch(X, Y)):
        np.testing.assert_allclose(found, loss, rtol=1e-4)


@pytest.mark.jax
def test_predictions_follow_the_weights(tmp_path):
    model, path = make_model(), str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    for change in (
        lambda: None,
        lambda: model.fit(X, Y, validation_data=(X, Y), verbose=0),
        lambda: model.dictionary.assign(keys=normal(9, 5)),
        lambda: [each.assign(2 * each) for each in model.head.trainable_variables],
        lambda: model.load_weights(path),
        lambda: model.set_weights([0.5 * each for each in model.get_weights()]),
    ):
        change()
        check_uses(model)


def test_predictions_of_deep_heads_follow_the_weights(eager):
    head = keras.Sequential([keras.layers.Dense(6, "relu"), CosineDense(3)])
    model = make_model(head, learning_rate_form="diagonal", inner_steps=2)
    for _ in range(2):
        check_uses(model)
        model.set_weights([0.9 * each for each in model.get_weights()])


@pytest.mark.jax
def test_callbacks_may_change_weights_before_the_first_batch():
    model, found = make_model(), []

    class Noting(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            found.append(float(CROSS_ENTROPY(Y, model(X))))

    model.fit(X, Y, verbose=0)
    model.head.kernel.assign(2 * model.head.kernel)
    swapped = [keras.callbacks.SwapEMAWeights(), Noting()]
    found.append(model.evaluate(X, Y, verbose=0, callbacks=swapped))
    np.testing.assert_allclose(*found, rtol=1e-5)
    assert abs(model.evaluate(X, Y, verbose=0) - found[0]) > 1e-3


@pytest.mark.jax
def test_constants_are_computed_once_a_call(counted):
    model = make_model()
    model.compile(loss=CROSS_ENTROPY, run_eagerly=True)
    for use in (
        lambda: model.predict(X, batch_size=4, verbose=0),
        lambda: model.evaluate(X, Y, batch_size=4, verbose=0),
        lambda: model.neighbors(X, batch_size=4),
    ):
        use()  # Keras may build its loss with a symbolic call first.
        counted.clear()
        use()
        assert len(counted) == 1
    model(X)
    model(X)
    assert len(counted) == 3  # Anew in each direct call.


@pytest.mark.skipif(not IS_TENSORFLOW, reason="A test step of TensorFlow")
def test_a_test_step_of_one_s_own_computes_everything(eager):
    class Trained(nsl_keras.MetaNeighborhoodModel):
        """Takes a step on the batch that it is tested on."""

        def test_step(self, batch):
            x, y = batch
            self.train_step(batch)
            return {"after": self.compute_loss(x, y, self(x, training=False))}

    model = make_model(kind=Trained)
    found = model.evaluate(X, Y, batch_size=20, verbose=0)
    np.testing.assert_allclose(found, float(CROSS_ENTROPY(Y, model(X))), rtol=1e-4)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="A train step of TensorFlow")
def test_losses_and_metrics_of_one_s_own(eager):
    """`compute_loss` without `training`; metrics in another order or without the loss."""

    class Own(nsl_keras.MetaNeighborhoodModel):
        hidden = ""

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return 2 * super().compute_loss(x, y, y_pred, sample_weight)

        @property
        def metrics(self):
            return [each for each in super().metrics[::-1] if each.name != self.hidden]

    model = make_model(kind=Own)
    for hidden, shown in ("", {"loss", "accuracy"}), ("loss", {"accuracy"}):
        model.hidden = hidden
        model.compile("sgd", CROSS_ENTROPY, metrics=["accuracy"])
        expected = 2 * float(CROSS_ENTROPY(Y, model(X)))
        history = model.fit(X, Y, batch_size=20, verbose=0).history
        np.testing.assert_allclose(history.get("loss", expected), expected, rtol=1e-4)
        assert set(history) == shown


def test_a_second_build_changes_nothing():
    model = make_model()
    model.predict(X, verbose=0)
    model.build(X.shape)
    assert not any("constant" in each.path for each in model.weights)
    model.head.kernel.assign(normal(5, 3, seed=3))
    with model.neighborhood.constants.used(update=False):
        assert_close(model(X, training=True), model.predict(X, verbose=0))
    assert_close(model.predict(X, verbose=0), model(X))
