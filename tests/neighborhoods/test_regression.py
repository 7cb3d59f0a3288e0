"""Regression: the squared error inside, free or given values, and checks of targets."""

import keras
import numpy as np
import pytest
from golden_files import gradients
from keras import ops

import nsl_keras
from nsl_keras.layers import MetaNeighborhoodHead, NeighborDictionary

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
DTYPE = "float64" if IS_TENSORFLOW else "float32"
ENTRIES, FEATURES, OUTPUTS, BATCH = 7, 5, 2, 4
rng = np.random.default_rng(0)
X = rng.normal(size=(96, 3)).astype("float32")
Y = np.stack([np.sin(2 * X[:, 0]), X[:, 1] * X[:, 2]], axis=1).astype("float32")


def mlp(units, layers, dtype="float32"):
    stack = [keras.layers.Dense(units, "tanh", dtype=dtype) for _ in range(layers - 1)]
    return keras.Sequential([*stack, keras.layers.Dense(OUTPUTS, dtype=dtype)])


def make_model(head=None, **options):
    options = {"num_neighbors": 20, "task": "regression", "seed": 0, **options}
    return nsl_keras.MetaNeighborhoodModel(head or mlp(16, 2), **options)


def build_pair(layers, seed=0, **options):
    pair = [
        MetaNeighborhoodHead(
            mlp(6, layers, DTYPE),
            ENTRIES,
            task="regression",
            inner_loop=inner_loop,
            inner_learning_rate=0.3,
            dictionary_dropout=0.0,
            dtype=DTYPE,
            **options,
        )
        for inner_loop in ("dual", "tape")
    ]
    for layer in pair:
        layer.build((None, FEATURES))
    rng = np.random.default_rng(seed)
    for mine, other in zip(*(layer.trainable_variables for layer in pair), strict=True):
        value = 0.5 * rng.normal(size=mine.shape)
        mine.assign(value)
        other.assign(value)
    return pair, ops.convert_to_tensor(rng.normal(size=(BATCH, FEATURES)), dtype=DTYPE)


def outer_loss(layer, z):
    targets = ops.reshape(ops.arange(BATCH * OUTPUTS, dtype=z.dtype), (BATCH, OUTPUTS))
    return ops.mean(ops.square(layer.adapted_logits(z) - 0.3 * targets))


@pytest.mark.parametrize(
    ("layers", "steps", "metric"),
    [
        (1, 1, "cosine"),
        (1, 2, "euclidean"),
        (2, 1, "euclidean"),
        (2, 2, "cosine"),
        (4, 1, "cosine"),
        (4, 2, "euclidean"),
    ],
)
def test_dual_and_tape_agree(layers, steps, metric):
    pair, z = build_pair(layers, inner_steps=steps, metric=metric)
    assert [layer.active_inner_loop for layer in pair] == ["dual", "tape"]
    found = [
        [
            layer.adapted_logits(z),
            *layer.adapted_weights(z),
            *gradients(
                lambda z, layer=layer: outer_loss(layer, z), [z], layer.trainable_variables
            ),
        ]
        for layer in pair
    ]
    tolerance = 1e-9 if IS_TENSORFLOW else 1e-4
    for dual, tape in zip(*found, strict=True):
        dual, tape = ops.convert_to_numpy(dual), ops.convert_to_numpy(tape)
        scale = max(np.abs(tape).max(), 1e-3)
        np.testing.assert_allclose(dual, tape, rtol=0, atol=tolerance * scale)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="float64 needs the TensorFlow backend")
def test_gradients_against_finite_differences():
    (layer, _), z = build_pair(2)
    variables = layer.trainable_variables
    assert "value_targets" in {v.name for v in variables}
    found = gradients(lambda z: outer_loss(layer, z), [z], variables)[1:]
    rng = np.random.default_rng(5)
    for variable, gradient in zip(variables, found, strict=True):
        direction = rng.normal(size=variable.shape)
        start = ops.convert_to_numpy(variable.value).copy()
        losses = []
        for sign in (1, -1):
            variable.assign(start + sign * 1e-5 * direction)
            losses.append(float(outer_loss(layer, z)))
        variable.assign(start)
        expected = (losses[0] - losses[1]) / 2e-5
        assert abs(expected) > 1e-7, f"{variable.path} has no influence"
        received = np.sum(ops.convert_to_numpy(gradient) * direction)
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-9)


def test_one_step_by_hand():
    """A linear head: the gradient of the weighted squared error, written out."""
    layer = MetaNeighborhoodHead(
        keras.layers.Dense(OUTPUTS), ENTRIES, task="regression", inner_learning_rate=0.1
    )
    layer.build((None, FEATURES))
    rng = np.random.default_rng(2)
    keys, values = rng.normal(size=(7, 5)), rng.normal(size=(7, 2))
    layer.dictionary.assign(keys, values)
    z = rng.normal(size=(BATCH, FEATURES)).astype("float32")
    attention = ops.convert_to_numpy(layer.dictionary.attention(z))
    kernel, bias = (ops.convert_to_numpy(v) for v in layer.head.weights)
    errors = 2 * (keys @ kernel + bias - values)
    expected = []
    for weights, example in zip(attention, z, strict=True):
        new_kernel = kernel - 0.1 * keys.T @ (weights[:, None] * errors)
        new_bias = bias - 0.1 * weights @ errors
        expected.append(example @ new_kernel + new_bias)
    np.testing.assert_allclose(layer(z), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["huber", keras.losses.MeanAbsoluteError()])
def test_any_regression_loss(loss):
    model = make_model(inner_learning_rate=0.1, metric="euclidean", temperature=1.0)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["mae"])
    history = model.fit(X, Y, epochs=15, batch_size=32, verbose=0).history
    assert set(history) == {"loss", "mae", "unadapted_mae"}
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    found = model.evaluate(X, Y, verbose=0, return_dict=True)
    errors = np.abs(model.predict(X, verbose=0) - Y)
    np.testing.assert_allclose(found["mae"], errors.mean(), rtol=1e-4)
    plain = ops.convert_to_numpy(model(X, adapt=False))
    np.testing.assert_allclose(found["unadapted_mae"], np.abs(plain - Y).mean(), rtol=1e-4)
    assert found["mae"] != found["unadapted_mae"]


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_one_output_takes_vectors(dtype):
    y = np.round(3 * Y[:, 0]).astype(dtype)
    found = []
    for targets in (y, y[:, None]):
        model = make_model(keras.layers.Dense(1, kernel_initializer="ones"))
        model.compile("sgd", "mse")
        model.build((None, 3))
        model.neighborhood.dictionary.assign(X[:20], X[:20, :1])
        found.append(model.evaluate(X, targets, verbose=0))
    predictions = model.predict(X, verbose=0)
    assert predictions.shape == (96, 1)
    expected = np.mean((predictions[:, 0] - y) ** 2)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_values_are_free_or_given(tmp_path):
    free = make_model()
    free.build((None, 3))
    values = ops.convert_to_numpy(free.neighborhood.dictionary.values)
    assert 0 < np.abs(values).max() < 0.1
    given = np.linspace(-5, 5, 40).reshape(20, 2)
    model = make_model(fixed_values=given)
    model.build((None, 3))
    dictionary = model.neighborhood.dictionary
    assert [v.name for v in dictionary.trainable_variables] == ["keys"]
    np.testing.assert_allclose(dictionary.values, given, rtol=1e-6)
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again.neighborhood.dictionary.values, given, rtol=1e-6)
    np.testing.assert_array_equal(again.predict(X, verbose=0), model.predict(X, verbose=0))
    assert again.task == "regression"
    with pytest.raises(ValueError, match="`values` must be None where the dictionary has"):
        dictionary.assign(values=given)


def test_one_output_and_a_squashed_one_are_heads_too():
    """What a classifier may not have: `predict` needs no logits here."""
    model = make_model(keras.layers.Dense(1, "sigmoid"))
    assert model.predict(X, verbose=0).shape == (96, 1)
    with pytest.raises(ValueError, match=r'of at least two classes.*task="regression"'):
        make_model(keras.layers.Dense(1), task="classification").build((None, 3))
    reshaping = keras.Sequential([keras.layers.Dense(4), keras.layers.Reshape((2, 2))])
    with pytest.raises(ValueError, match=r"outputs of shape .batch, outputs."):
        make_model(reshaping).build((None, 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "ranking"}, "`task` must be one of 'classification', 'regression'"),
        ({"fixed_values": True}, "`fixed_values` must be the values themselves"),
        ({"fixed_values": np.zeros((3, 2))}, r"`fixed_values` must be numbers of shape"),
        ({"fixed_values": np.full((20, 2), np.nan)}, "`fixed_values` must be finite"),
        ({"fixed_values": "random"}, "`fixed_values` must be numbers of shape"),
        (
            {"task": "classification", "fixed_values": np.ones((20, 2))},
            "Each row of `fixed_values` must be a probability distribution",
        ),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        make_model(**options)


def test_given_values_must_fit_the_head():
    model = make_model(fixed_values=np.zeros((20, 3)))
    with pytest.raises(ValueError, match=r"shape \(20, 2\)"):
        model.build((None, 3))


def test_given_probabilities_of_a_classifier():
    given = np.array([[0.5, 0.5, 0.0], [0.0, 0.2, 0.8]])
    dictionary = NeighborDictionary(2, 3, fixed_values=given)
    dictionary.build((None, 4))
    np.testing.assert_allclose(dictionary.values, given, rtol=1e-6)
    assert NeighborDictionary.from_config(dictionary.get_config()).fixed_values == (
        given.tolist()
    )


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (Y[:, 0], r"`y` must have the shape of the head's outputs, \(n, 2\).*\(96,\)"),
        (Y[:, :1], r"`y` must have the shape of the head's outputs"),
        (np.concatenate([Y, Y], 1), r"Received: y.shape=\(96, 4\)"),
        (np.where(np.arange(96)[:, None] == 7, np.nan, Y), "`y` must be finite.*(7, 0)"),
        (Y.astype("str"), "`y` must hold numbers"),
    ],
)
def test_bad_targets(y, message):
    model = make_model()
    model.compile("sgd", "mse")
    for method in ("fit", "evaluate", "initialize_from"):
        options = {} if method == "initialize_from" else {"verbose": 0}
        with pytest.raises(ValueError, match=message):
            getattr(model, method)(X, y, **options)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="only TensorFlow's graphs can check data")
def test_bad_targets_in_data_sets():
    import tensorflow as tf

    model = make_model()
    model.build((None, 3))
    model.compile("sgd", "mse")
    wrong = tf.data.Dataset.from_tensor_slices((X, Y[:, :1])).batch(16)
    with pytest.raises(ValueError, match="`y` must have the shape of the head's outputs"):
        model.fit(wrong, shuffle=False, verbose=0)
    spoiled = Y.copy()
    spoiled[3] = np.inf
    wrong = tf.data.Dataset.from_tensor_slices((X, spoiled)).batch(16)
    with pytest.raises(tf.errors.InvalidArgumentError, match="`y` must be finite"):
        model.fit(wrong, shuffle=False, verbose=0)
