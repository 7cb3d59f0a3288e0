"""The layer that adapts: what it is in special cases, and what it refuses."""

import adapting_heads as heads
import keras
import numpy as np
import pytest
from golden_files import gradients
from keras import ops

from nsl_keras.layers import CosineDense, MetaNeighborhoodHead, NeighborDictionary


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_no_adaptation_is_the_plain_head(task):
    layer = heads.build("relu", "linear", task=task)
    z = heads.features()
    np.testing.assert_array_equal(layer(z, adapt=False), layer.head(z))
    # A rate of nearly zero adapts by nearly nothing.
    layer.rate.raw_rates[0].assign(1e-12)
    np.testing.assert_allclose(layer(z), layer.head(z), rtol=1e-5, atol=1e-6)


def test_all_zero_features_and_keys_stay_finite():
    layer = heads.build("cosine", dtype="float32")
    keys = ops.convert_to_numpy(layer.dictionary.keys.value).copy()
    keys[0] = 0
    layer.dictionary.keys.assign(keys)
    z = ops.zeros((heads.BATCH, heads.FEATURES))
    found = gradients(lambda z: heads.outer_loss(layer, z), [z], layer.trainable_variables)
    for tensor in (layer.adapted_logits(z), *found):
        assert np.all(np.isfinite(ops.convert_to_numpy(tensor)))


def test_a_number_makes_the_default_dictionary():
    layer = MetaNeighborhoodHead(CosineDense(3), 8)
    assert isinstance(layer.dictionary, NeighborDictionary)
    assert layer.dictionary.num_neighbors == 8
    mine = NeighborDictionary(8, metric="euclidean")
    assert MetaNeighborhoodHead(CosineDense(3), mine).dictionary is mine


def ending_in(operation):
    """A functional head, whose last layer is not that of a `Sequential` one."""
    inputs = keras.Input((4,))
    return keras.Model(inputs, operation(keras.layers.Dense(3)(inputs)))


def normalized(layer, **options):
    inner = layer(name="inner_norm", **options)
    return keras.Sequential([keras.layers.Dense(4), inner, keras.layers.Dense(3)])


def of_two_outputs(form):
    features = keras.Input((4,))
    return keras.Model(features, form([keras.layers.Dense(n)(features) for n in (1, 2)]))


def quantized():
    head = keras.layers.Dense(3)
    head.build((None, 4))
    head.quantize("int8")
    return head


REGRESSION = {"task": "regression"}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: keras.layers.Dense(1), {}, r'at least two classes.*task="regression"'),
        (lambda: keras.layers.Dense(3, activation="softmax"), {}, "must return logits"),
        (lambda: ending_in(keras.layers.Activation("sigmoid")), {}, "must return logits"),
        (lambda: ending_in(ops.softmax), {}, "must return logits"),
        (
            lambda: keras.Sequential(
                [keras.Sequential([keras.layers.Dense(3, "softmax")])]
            ),
            {},
            "must return logits",
        ),
        (lambda: keras.layers.Reshape((2, 2)), {}, "of shape .batch, classes."),
        (lambda: keras.layers.Reshape((2, 2)), REGRESSION, "of shape .batch, outputs."),
        (lambda: of_two_outputs(list), REGRESSION, r"one tensor.*\[\(None, 1\), "),
        (
            lambda: normalized(keras.layers.Dropout, rate=0.5),
            {"inner_loop": "dual"},
            "Dropout",
        ),
        (
            lambda: normalized(keras.layers.BatchNormalization),
            {},
            "must not have state.*inner_norm/moving_mean",
        ),
        (
            lambda: keras.Sequential([keras.layers.Dense(3, dtype="mixed_float16")]),
            {"inner_loop": "tape"},
            "must compute in float32",
        ),
        (
            lambda: normalized(keras.layers.UnitNormalization),
            {"chunk_size": 3},
            "`chunk_size` must be None on the nested tape",
        ),
        (
            lambda: keras.layers.Dense(3, activity_regularizer="l2", name="own"),
            {},
            "not have an activity regularizer.*'own' with",
        ),
        (lambda: keras.layers.Dense(3, lora_rank=2), {}, "plain kernels.*'Dense'"),
        (quantized, {}, "plain kernels.*'Dense'"),
        pytest.param(
            lambda: normalized(keras.layers.GroupNormalization, groups=1),
            {},
            r"`head` must be .* exact.*layer 'inner_norm'",
            marks=pytest.mark.skipif(
                keras.backend.backend() == "jax", reason="JAX differentiates exactly"
            ),
        ),
    ],
)
def test_heads_that_cannot_adapt(make, options, message):
    layer = MetaNeighborhoodHead(make(), 4, **options)
    with pytest.raises(ValueError, match=message):
        layer.build((None, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dictionary": 0}, "`dictionary` must be a positive integer"),
        ({"dictionary": "large"}, "`dictionary` must be a positive integer"),
        ({"inner_steps": 0}, "`inner_steps` must be a positive integer"),
        ({"inner_learning_rate": -1.0}, "`inner_learning_rate` must be a finite number"),
        ({"learning_rate_form": "matrix"}, "`learning_rate_form` must be one of"),
        ({"chunk_size": 0}, "`chunk_size` must be a positive integer"),
        ({"task": "ranking"}, "`task` must be one of 'classification', 'regression'"),
        ({"inner_loop": "fast"}, "`inner_loop` must be one of 'auto', 'dual', 'tape'"),
        ({"head": "dense"}, "`head` must be a Keras layer"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        MetaNeighborhoodHead(**{"head": CosineDense(3), "dictionary": 4, **options})


@pytest.mark.parametrize("inner_loop", ["dual", "tape"])
def test_frozen_layers_adapt(inner_loop):
    head = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)]
    )
    layer = MetaNeighborhoodHead(head, 6, inner_loop=inner_loop)
    x = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
    expected = layer(x)
    head.layers[0].trainable = False
    again = MetaNeighborhoodHead(head, layer.dictionary, inner_loop=inner_loop)
    np.testing.assert_allclose(again(x), expected, atol=1e-6)
    assert [each.trainable for each in head.layers] == [False, True]
    assert len(again.trainable_variables) == len(layer.trainable_variables)


@pytest.mark.parametrize("method", ["adapted_logits", "adapted_weights", "nearest"])
def test_what_needs_a_built_layer(method):
    layer = MetaNeighborhoodHead(CosineDense(3), 8)
    with pytest.raises(ValueError, match=f"`{method}` needs a built layer"):
        getattr(layer, method)(ops.ones((2, 4)))
    with pytest.raises(ValueError, match="`active_inner_loop` needs a built layer"):
        _ = layer.active_inner_loop


@pytest.mark.jax
@pytest.mark.parametrize("inner_loop", ["dual", "tape"])
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_integer_features(inner_loop, metric):
    features = np.arange(24).reshape(4, 6)
    dictionary = NeighborDictionary(20, metric=metric)
    layer = MetaNeighborhoodHead(CosineDense(3), dictionary, inner_loop=inner_loop)
    expected = layer(features.astype("float32"))
    np.testing.assert_array_equal(
        ops.convert_to_numpy(layer(features)), ops.convert_to_numpy(expected)
    )


def test_neighbors_in_half_precision():
    layer = MetaNeighborhoodHead(keras.layers.Dense(3), 5, dtype="bfloat16")
    layer.build((None, 4))
    found = layer.neighbors(ops.ones((2, 4), dtype="bfloat16"), k=2)
    assert tuple(found.output_changes.shape) == (2, 2, 3)
