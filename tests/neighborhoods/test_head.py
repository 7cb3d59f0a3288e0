"""The two inner loops agree: with each other, finite differences and special cases."""

import keras
import numpy as np
import pytest
from golden_files import gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

import nsl_keras
from nsl_keras.layers import CosineDense, MetaNeighborhoodHead

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"
DTYPE = "float64" if IS_TENSORFLOW else "float32"
FEATURES, CLASSES, ENTRIES, BATCH = 5, 3, 7, 4


def stack(kinds, dtype, hidden_bias=True):
    """A head of dense layers, e.g. `("tanh", "linear")` or `("relu", "cosine")`."""
    layers = []
    for index, kind in enumerate(kinds):
        units = CLASSES if index == len(kinds) - 1 else 6
        if kind == "cosine":
            layers.append(CosineDense(units, scale=3.0, dtype=dtype))
        else:
            layers.append(
                keras.layers.Dense(
                    units, activation=kind, use_bias=hidden_bias, dtype=dtype
                )
            )
    return layers[0] if len(layers) == 1 else keras.Sequential(layers)


def build_pair(kinds, dtype=DTYPE, hidden_bias=True, seed=0, **options):
    """The same adapting head twice: dual form and tape, sharing no variables."""
    pair = []
    for inner_loop in ("dual", "tape"):
        layer = MetaNeighborhoodHead(
            stack(kinds, dtype, hidden_bias),
            num_neighbors=ENTRIES,
            inner_loop=inner_loop,
            inner_learning_rate=0.3,
            dictionary_dropout=0.0,
            dtype=dtype,
            **options,
        )
        layer.build((None, FEATURES))
        pair.append(layer)
    rng = np.random.default_rng(seed)
    for mine, other in zip(*(layer.trainable_variables for layer in pair), strict=True):
        value = 0.5 * rng.normal(size=mine.shape)
        if mine.name == "scale":
            value = value + 3.0
        mine.assign(value)
        other.assign(value)
    return pair, rng.normal(size=(BATCH, FEATURES))


def outer_loss(layer, z):
    targets = ops.one_hot(ops.arange(BATCH) % CLASSES, CLASSES, dtype=z.dtype)
    logits = layer.adapted_logits(z)
    return ops.mean(ops.logsumexp(logits, axis=-1) - ops.sum(targets * logits, axis=-1))


def check_agreement(pair, features, tolerance):
    z = ops.convert_to_tensor(features, dtype=pair[0].variable_dtype)
    found = []
    for layer in pair:
        outer = gradients(
            lambda z, layer=layer: outer_loss(layer, z), [z], layer.trainable_variables
        )
        weights = layer.adapted_weights(z)
        found.append([layer.adapted_logits(z), *weights, *outer])
    assert len(found[0]) == len(found[1])
    for dual, tape in zip(*found, strict=True):
        dual, tape = ops.convert_to_numpy(dual), ops.convert_to_numpy(tape)
        scale = max(np.abs(tape).max(), 1e-3)
        np.testing.assert_allclose(dual, tape, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("form", ["scalar", "diagonal", "fixed"])
@pytest.mark.parametrize("kinds", [("cosine",), ("linear",), ("tanh", "linear")])
def test_dual_and_tape_agree(kinds, form, steps):
    pair, features = build_pair(kinds, inner_steps=steps, learning_rate_form=form)
    check_agreement(pair, features, 1e-9 if IS_TENSORFLOW else 1e-4)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="float64 needs the TensorFlow backend")
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    hidden=st.lists(st.sampled_from(["relu", "tanh", "gelu", "linear"]), max_size=3),
    last=st.sampled_from(["linear", "cosine"]),
    hidden_bias=st.booleans(),
    steps=st.integers(1, 3),
    metric=st.sampled_from(["cosine", "euclidean"]),
)
def test_random_stacks_agree(hidden, last, hidden_bias, steps, metric):
    pair, features = build_pair(
        (*hidden, last), hidden_bias=hidden_bias, inner_steps=steps, metric=metric
    )
    check_agreement(pair, features, 1e-9)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="float64 needs the TensorFlow backend")
@pytest.mark.parametrize("inner_loop", [0, 1], ids=["dual", "tape"])
@pytest.mark.parametrize("kinds", [("cosine",), ("linear",)])
def test_outer_gradients_against_finite_differences(kinds, inner_loop):
    """Labels (value logits) included: a fused inner loss would give them zeros."""
    pair, features = build_pair(kinds, inner_steps=2)
    layer = pair[inner_loop]
    z = ops.convert_to_tensor(features, dtype="float64")
    variables = layer.trainable_variables
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
        received = np.sum(ops.convert_to_numpy(gradient) * direction)
        assert abs(expected) > 1e-7, f"{variable.path} has no influence"
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-9)


def test_no_adaptation_is_the_plain_head():
    (layer, _), features = build_pair(("tanh", "linear"))
    z = ops.convert_to_tensor(features, dtype=layer.variable_dtype)
    np.testing.assert_array_equal(layer(z, adapt=False), layer.head(z))
    # A rate of nearly zero adapts by nearly nothing.
    for rate in layer.rate.raw_rates:
        rate.assign(1e-12)
    np.testing.assert_allclose(layer(z), layer.head(z), rtol=1e-5, atol=1e-6)


def test_weighted_vote():
    """From zero logits, the class of a constant head is the weighted vote."""
    head = keras.layers.Dense(CLASSES, kernel_initializer="zeros")
    layer = MetaNeighborhoodHead(head, num_neighbors=ENTRIES, inner_learning_rate=1.0)
    rng = np.random.default_rng(0)
    # Orthogonal to every key, so that the kernel's own step adds nothing.
    keys = np.concatenate([rng.normal(size=(ENTRIES, FEATURES)), np.zeros((ENTRIES, 1))], 1)
    layer.build((None, FEATURES + 1))
    layer.dictionary.keys.assign(keys)
    layer.dictionary.value_logits.assign(rng.normal(size=(ENTRIES, CLASSES)))
    z = np.zeros((1, FEATURES + 1), "float32")
    z[0, -1] = 1.0
    weights = ops.convert_to_numpy(layer.dictionary.attention(z))
    vote = weights @ ops.convert_to_numpy(layer.dictionary.values)
    logits = ops.convert_to_numpy(layer.adapted_logits(z))
    np.testing.assert_allclose(logits, vote - 1 / CLASSES, atol=1e-6)


def test_low_temperature_looks_at_the_nearest_neighbor():
    (layer, _), features = build_pair(("cosine",), temperature=1e-4)
    found = layer.neighbors(features.astype("float32"), k=1)
    keys = ops.convert_to_numpy(layer.dictionary.keys.value)
    cosines = (
        features
        @ keys.T
        / np.linalg.norm(features, axis=1)[:, None]
        / np.linalg.norm(keys, axis=1)
    )
    np.testing.assert_array_equal(found.indices[:, 0], cosines.argmax(axis=1))
    np.testing.assert_allclose(found.weights[:, 0], 1, atol=1e-5)


def test_all_zero_features_and_keys_stay_finite():
    (layer, _), features = build_pair(("cosine",), dtype="float32")
    keys = ops.convert_to_numpy(layer.dictionary.keys.value).copy()
    keys[0] = 0
    layer.dictionary.keys.assign(keys)
    z = ops.convert_to_tensor(np.zeros_like(features), dtype="float32")
    found = gradients(lambda z: outer_loss(layer, z), [z], layer.trainable_variables)
    for tensor in (layer.adapted_logits(z), *found):
        assert np.all(np.isfinite(ops.convert_to_numpy(tensor)))


def test_auto_picks_and_says_which(caplog):
    dense = MetaNeighborhoodHead(keras.layers.Dense(3), num_neighbors=4)
    dense.build((None, 5))
    assert dense.active_inner_loop == "dual"
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(5)(inputs)
    residual = keras.Model(inputs, keras.layers.Dense(3)(hidden + inputs))
    other = MetaNeighborhoodHead(residual, num_neighbors=4, dictionary_dropout=0.0)
    other.build((None, 5))
    assert other.active_inner_loop == "tape"
    assert tuple(other(np.ones((2, 5), "float32")).shape) == (2, 3)


@pytest.mark.parametrize(
    ("head", "options", "message"),
    [
        (keras.layers.Dense(1), {}, "at least two classes"),
        (keras.layers.Dense(3, activation="softmax"), {}, "must return logits"),
        (keras.layers.Reshape((2, 2)), {}, "of shape .batch, classes."),
        (
            keras.Sequential([keras.layers.LayerNormalization(), keras.layers.Dense(3)]),
            {"inner_loop": "dual"},
            "LayerNormalization",
        ),
        (
            keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dense(3)]),
            {},
            "must not have non-trainable variables",
        ),
    ],
)
def test_heads_that_cannot_adapt(head, options, message):
    layer = MetaNeighborhoodHead(head, num_neighbors=4, **options)
    with pytest.raises(ValueError, match=message):
        layer.build((None, 4))


def test_half_precision_on_the_tape_is_refused():
    head = keras.Sequential([keras.layers.Dense(3, dtype="mixed_float16")])
    layer = MetaNeighborhoodHead(head, num_neighbors=4, inner_loop="tape")
    with pytest.raises(ValueError, match="must compute in float32"):
        layer.build((None, 4))


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX differentiates exactly")
@pytest.mark.parametrize(
    "layer", [keras.layers.LayerNormalization, keras.layers.GroupNormalization]
)
def test_heads_with_inexact_second_derivatives_are_refused(layer):
    options = {"groups": 1} if layer is keras.layers.GroupNormalization else {}
    inner = layer(name="inner_norm", **options)
    head = keras.Sequential([keras.layers.Dense(4), inner, keras.layers.Dense(3)])
    adapting = MetaNeighborhoodHead(head, num_neighbors=4)
    with pytest.raises(ValueError, match=r"`head` must be .* exact.*layer 'inner_norm'"):
        adapting.build((None, 4))
    # These divide by a norm without a mean, and are exact.
    exact = [keras.layers.Dense(4), keras.layers.UnitNormalization(), keras.layers.Dense(3)]
    MetaNeighborhoodHead(keras.Sequential(exact), num_neighbors=4).build((None, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_neighbors": 0}, "`num_neighbors` must be a positive integer"),
        ({"metric": "manhattan"}, "`metric` must be one of 'cosine', 'euclidean'"),
        ({"temperature": 0.0}, "`temperature` must be a finite number above zero"),
        ({"inner_steps": 0}, "`inner_steps` must be a positive integer"),
        ({"inner_learning_rate": -1.0}, "`inner_learning_rate` must be a finite number"),
        ({"learning_rate_form": "matrix"}, "`learning_rate_form` must be one of"),
        ({"dictionary_dropout": 1.0}, r"`dropout` must be a number in \[0, 1\)|in \[0, 1"),
        ({"dropout_scope": "layer"}, "`dropout_scope` must be one of"),
        ({"inner_loop": "fast"}, "`inner_loop` must be one of 'auto', 'dual', 'tape'"),
        ({"head": "dense"}, "`head` must be a Keras layer"),
    ],
)
def test_bad_arguments(options, message):
    arguments = {"head": keras.layers.Dense(3), "num_neighbors": 4, **options}
    with pytest.raises(ValueError, match=message):
        MetaNeighborhoodHead(**arguments)


def test_neighbors_checks_k():
    (layer, _), features = build_pair(("cosine",))
    with pytest.raises(ValueError, match="`k` must be at most `num_neighbors`"):
        layer.neighbors(features, k=ENTRIES + 1)
    with pytest.raises(ValueError, match="known once the layer is built"):
        _ = MetaNeighborhoodHead(CosineDense(3), 4).active_inner_loop


def test_head_is_exported_from_the_public_namespace():
    assert nsl_keras.layers.MetaNeighborhoodHead is MetaNeighborhoodHead
