"""`MetaNeighborhoodModel` in `fit`, `evaluate`, `predict` and on file."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import ops

import nsl_keras
from nsl_keras.layers import CosineDense, MetaNeighborhoodHead, NeighborDictionary

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
rng = np.random.default_rng(0)
X = rng.normal(size=(48, 6)).astype("float32")
Y = rng.integers(0, 3, size=48)


def make_backbone(**options):
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, **options)])


def make_dictionary(dropout=0.0, **options):
    """By default one that makes a training step deterministic."""
    return NeighborDictionary(10, dropout=dropout, **options)


def make_model(dictionary=None, **options):
    return nsl_keras.MetaNeighborhoodModel(
        make_backbone(), CosineDense(3), dictionary or make_dictionary(), **options
    )


def make_stock_model(**backbone_options):
    """The same network as a functional model, trained by Keras's own step."""
    backbone = make_backbone(**backbone_options)
    outputs = MetaNeighborhoodHead(CosineDense(3), make_dictionary())(backbone.outputs[0])
    return keras.Model(backbone.inputs[0], outputs)


def make_twins(**backbone_options):
    stock = make_stock_model(**backbone_options)
    model = nsl_keras.MetaNeighborhoodModel(
        make_backbone(**backbone_options), CosineDense(3), make_dictionary()
    )
    model.build((None, 6))
    rng = np.random.default_rng(1)
    for mine, theirs in zip(
        sorted(model.trainable_variables, key=lambda v: (v.name, tuple(v.shape))),
        sorted(stock.trainable_variables, key=lambda v: (v.name, tuple(v.shape))),
        strict=True,
    ):
        value = ops.convert_to_numpy(theirs.value) + 0.3 * rng.normal(size=mine.shape)
        mine.assign(value)
        theirs.assign(value)
    return model, stock


def check_same_training(model, stock, fit=None, make_optimizer=None):
    histories = []
    for each in (model, stock):
        optimizer = make_optimizer() if make_optimizer else keras.optimizers.SGD(0.5)
        each.compile(optimizer=optimizer, loss=LOSS, metrics=["accuracy"])
        arguments = {"epochs": 3, "batch_size": 16, "shuffle": False, "verbose": 0}
        histories.append(each.fit(X, Y, **arguments, **(fit or {})).history)
    for key in ("loss", "accuracy"):
        np.testing.assert_allclose(histories[0][key], histories[1][key], rtol=1e-4)
    np.testing.assert_allclose(model(X), stock(X), rtol=1e-3, atol=1e-4)
    return histories[0]


SAMPLE_WEIGHT = {"sample_weight": np.linspace(0, 2, 48).astype("float32")}
CLASS_WEIGHT = {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}}
VALIDATION = {"validation_split": 0.25}


@pytest.mark.parametrize(
    ("fit", "make_optimizer"),
    [
        (VALIDATION, lambda: keras.optimizers.SGD(0.5)),
        (
            SAMPLE_WEIGHT,
            lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=2),
        ),
        (
            CLASS_WEIGHT,
            lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, clipvalue=0.05),
        ),
        (
            {},
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.1, use_ema=True)
            ),
        ),
    ],
    ids=["validation", "weights_accumulation", "weights_adamw", "loss_scale_clip_ema"],
)
def test_step_equals_that_of_keras(fit, make_optimizer):
    """Options of `fit` and of optimizers act as in Keras."""
    history = check_same_training(*make_twins(), fit, make_optimizer)
    assert "unadapted_accuracy" in history
    if "validation_split" in fit:
        assert "val_unadapted_accuracy" in history


def test_regularizers_and_added_losses_count():
    twins = make_twins(kernel_regularizer="l2", activity_regularizer="l1")
    twins[0](X)
    penalties = [float(loss) for loss in twins[0].losses]
    assert len(penalties) == 2
    assert min(penalties) > 1e-3
    check_same_training(*twins)


@pytest.mark.parametrize(
    ("inner_loop", "jit_compile"), [("dual", False), ("dual", True), ("tape", False)]
)
def test_compiled_steps(inner_loop, jit_compile):
    model = make_model(make_dictionary(0.5, seed=0), inner_loop=inner_loop)
    model.compile("adam", LOSS, metrics=["accuracy"], jit_compile=jit_compile)
    first = model.fit(X, Y, epochs=8, batch_size=16, verbose=0).history["loss"]
    assert first[-1] < first[0]


@pytest.mark.skipif(not IS_TENSORFLOW, reason="JAX compiles a tape once")
def test_compiled_tape_warns():
    model = make_model(inner_loop="tape")
    model.build((None, 6))
    model.compile("sgd", LOSS, jit_compile=True)
    with pytest.warns(UserWarning, match="anew at every step"):
        model.train_on_batch(X[:4], Y[:4])


def test_metrics_before_adaptation():
    model = make_model(inner_learning_rate=5.0)
    model.compile(
        "sgd",
        LOSS,
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
        weighted_metrics=[
            keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="xent")
        ],
    )
    weights = np.linspace(0, 2, 48).astype("float32")
    found = model.evaluate(
        X, Y, sample_weight=weights, verbose=0, return_dict=True, batch_size=10
    )
    assert set(found) == {
        "loss",
        *("accuracy", "top2", "xent"),
        *("unadapted_accuracy", "unadapted_top2", "unadapted_xent"),
    }
    for prefix, adapt in (("", True), ("unadapted_", False)):
        logits = ops.convert_to_numpy(model(X, adapt=adapt))
        np.testing.assert_allclose(
            found[f"{prefix}accuracy"], np.mean(logits.argmax(axis=1) == Y), rtol=1e-5
        )
        losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(48), Y]
        np.testing.assert_allclose(
            found[f"{prefix}xent"], np.average(losses, weights=weights), rtol=1e-4
        )
    assert found["accuracy"] != found["unadapted_accuracy"]
    assert found["xent"] != found["unadapted_xent"]


def test_one_hot_targets_and_recompilation():
    model = make_model()
    one_hot = np.eye(3, dtype="float32")[Y]
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    for name in ("accuracy", "categorical_accuracy"):
        model.compile("sgd", loss, metrics=[name])
        history = model.fit(X, one_hot, verbose=0).history
        assert set(history) == {"loss", name, f"unadapted_{name}"}
    predicted = model.predict(X, verbose=0).argmax(axis=1)
    found = model.evaluate(X, one_hot, verbose=0, return_dict=True)
    np.testing.assert_allclose(
        found["categorical_accuracy"], np.mean(predicted == Y), rtol=1e-5
    )


def test_train_on_batch_and_data_sets():
    model = make_model()
    model.compile("sgd", LOSS, metrics=["accuracy"])
    assert "unadapted_accuracy" in model.train_on_batch(X, Y, return_dict=True)
    assert "unadapted_accuracy" in model.test_on_batch(X, Y, return_dict=True)
    batches = [(X[:16], Y[:16]), (X[16:], Y[16:])]

    def generate():
        while True:
            yield from batches

    history = model.fit(generate(), steps_per_epoch=2, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"][0])


def test_no_backbone():
    model = nsl_keras.MetaNeighborhoodModel(None, keras.layers.Dense(3), 5)
    model.compile("sgd", LOSS)
    model.fit(X, Y, verbose=0)
    assert model.predict(X, verbose=0).shape == (48, 3)
    with pytest.raises(ValueError, match="must be flattened or pooled"):
        nsl_keras.MetaNeighborhoodModel(None, keras.layers.Dense(3)).build((None, 4, 4, 3))


def test_keras_file_keeps_everything(tmp_path):
    model = make_model(inner_steps=2, learning_rate_form="diagonal")
    model.compile("adam", LOSS, metrics=["accuracy"])
    model.fit(X, Y, verbose=0)
    expected = model.predict(X, verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    again = keras.saving.load_model(path)
    np.testing.assert_array_equal(again.predict(X, verbose=0), expected)
    assert normal_form(again.get_config()) == normal_form(model.get_config())
    # Compiled again, with the optimizer's state: training goes on alike.
    first, second = (
        each.fit(X, Y, shuffle=False, verbose=0).history for each in (model, again)
    )
    assert set(first) == set(second)
    np.testing.assert_allclose(first["loss"], second["loss"], rtol=0.2)
    np.savez(tmp_path / "data.npz", x=X, expected=again.predict(X, verbose=0))
    again.save(path)
    script = (
        "import sys, json, numpy as np, keras, nsl_keras\n"
        "data = np.load(sys.argv[2])\n"
        "model = keras.saving.load_model(sys.argv[1])\n"
        "found = model.predict(data['x'], verbose=0)\n"
        "print(json.dumps(float(np.abs(found - data['expected']).max())))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(path), str(tmp_path / "data.npz")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads(result.stdout.splitlines()[-1]) < 1e-6


def test_neighbors_and_exempt_variables():
    model = make_model()
    with pytest.raises(ValueError, match="`decay_exempt_variables` needs a built model"):
        _ = model.decay_exempt_variables
    found = model.neighbors(X, k=3, batch_size=20)
    assert found.indices.shape == found.weights.shape == (48, 3)
    assert found.values.shape == (48, 3, 3)
    assert np.all(np.diff(found.weights, axis=1) <= 0)
    np.testing.assert_allclose(found.values.sum(axis=-1), 1, rtol=1e-5)
    exempt = {v.path for v in model.decay_exempt_variables}
    backbone = {v.path for v in model.backbone.trainable_variables}
    assert exempt | backbone == {v.path for v in model.trainable_variables}
    assert not exempt & backbone


def test_no_layer_is_left_behind():
    """An unbuilt sublayer would have Keras build the model anew in every `fit`."""
    model = make_model()
    model.build((None, 6))
    stack, seen = [model], []
    while stack:
        layer = stack.pop()
        seen.append(layer)
        stack += [each for each in vars(layer).values() if isinstance(each, keras.Layer)]
        assert layer.built, layer
    assert len({layer.name for layer in seen}) >= 5
    names = [v.path for v in model.variables]
    assert len(names) == len(set(names))
    assert sum("seed_generator" in name for name in names) == 1


def test_call_without_adaptation_is_head_of_backbone():
    model = make_model()
    plain = model.head(model.backbone(X))
    np.testing.assert_allclose(model(X, adapt=False), plain, rtol=1e-6)
    assert np.abs(ops.convert_to_numpy(model(X)) - plain).max() > 1e-6


def test_mixed_precision():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = make_model()
    model.compile("adam", LOSS, metrics=["accuracy"])
    losses = model.fit(X, Y, epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert model.predict(X, verbose=0).dtype == "float32"


def normal_form(config):
    return json.loads(json.dumps(config, default=str))


def spoiled(array, value):
    array = array.copy()
    array[5] = value
    return array


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (spoiled(X, np.nan), Y, "`x` must be finite. Received: 6 NaN"),
        (spoiled(X, np.inf), Y, "`x` must be finite"),
        (
            X,
            spoiled(Y, 3),
            "`y` must hold classes 0 to 2. Received: 1 labels outside, .*5: 3",
        ),
        (X, spoiled(Y, -1), "`y` must hold classes 0 to 2"),
        (X, Y + 0.5, "`y` must hold classes 0 to 2"),
        (X, (np.eye(3) + np.eye(3)[::-1])[Y], "multi-label targets are not supported"),
        (ops.convert_to_tensor(spoiled(X, np.nan)), Y, "`x` must be finite"),
        (X, np.eye(4)[Y], r"`y` must have shape \(n,\), \(n, 1\) or \(n, 3\)"),
    ],
)
def test_bad_arrays(x, y, message):
    model = make_model()
    model.compile("sgd", LOSS)
    model.build((None, 6))
    before = model.get_weights()
    for use in (
        lambda: model.fit(x, y, verbose=0),
        lambda: model.evaluate(x, y, verbose=0),
        lambda: model.fit(X, Y, validation_data=(x, y), verbose=0),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    for new, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(new, old)  # Nothing was lost.


@pytest.mark.skipif(not IS_TENSORFLOW, reason="only TensorFlow's graphs can check data")
@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (spoiled(X, np.nan), Y, "`x` must be finite"),
        (X, spoiled(Y, 3), "`y` must hold classes 0 to 2"),
        (X, (np.eye(3) + np.eye(3)[::-1])[Y], "multi-label targets are not supported"),
    ],
)
def test_bad_data_sets_in_graphs(x, y, message):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    model = make_model()
    model.build((None, 6))
    loss = LOSS if y.ndim == 1 else keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    before = model.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        model.fit(data, shuffle=False, verbose=0)
    if np.isnan(x[:16]).any():
        # Stopped in the first batch: nothing was lost.
        for new, old in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(new, old)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        model.evaluate(data, verbose=0)


def test_non_finite_loss_stops_compiled_training():
    batches = [(X[:16], Y[:16]), (spoiled(X[:16], np.nan), Y[:16])]

    def generate():
        while True:
            yield from batches

    model = make_model()
    model.compile("sgd", LOSS, jit_compile=True)
    with pytest.raises(
        nsl_keras.NonFiniteLossError, match="became nan in batch 2 of epoch 1"
    ):
        model.fit(generate(), steps_per_epoch=4, shuffle=False, verbose=0)


@pytest.mark.parametrize(
    "loss",
    [
        "sparse_categorical_crossentropy",
        keras.losses.SparseCategoricalCrossentropy(),
        keras.losses.CategoricalCrossentropy(from_logits=False),
    ],
)
def test_loss_of_probabilities_is_refused(loss):
    with pytest.raises(ValueError, match="`loss` must take logits"):
        make_model().compile("sgd", loss)


def test_metric_of_probabilities_is_refused():
    model = make_model()
    model.compile("sgd", LOSS, metrics=["crossentropy"])
    with pytest.raises(ValueError, match="'crossentropy'"):
        model.fit(X, Y, verbose=0)


def test_bad_backbone():
    with pytest.raises(ValueError, match="`backbone` must be a Keras layer"):
        nsl_keras.MetaNeighborhoodModel("resnet", CosineDense(3))
