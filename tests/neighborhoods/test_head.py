"""The layer that adapts: what it is in special cases, and what it refuses."""

import adapting_heads as heads
import keras
import numpy as np
import pytest
from helpers import as_numpy, assert_close, gradients, normal, randomize, refused, stacked
from keras import ops

import nsl_keras
from nsl_keras.layers import CosineDense, MetaNeighborhoodHead, NeighborDictionary


def test_all_zero_features_and_keys_stay_finite():
    layer = heads.build("cosine", dtype="float32")
    keys = as_numpy(layer.dictionary.keys)
    keys[0] = 0
    layer.dictionary.keys.assign(keys)
    z = ops.zeros((heads.BATCH, heads.FEATURES))
    found = gradients(lambda z: heads.outer_loss(layer, z), [z], layer.trainable_variables)
    for tensor in (layer(z), *found):
        assert np.all(np.isfinite(as_numpy(tensor)))


def ending_in(operation):
    """A functional head, whose last layer is not that of a `Sequential` one."""
    inputs = keras.Input((4,))
    return keras.Model(inputs, operation(keras.layers.Dense(3)(inputs)))


def dense(**options):
    return keras.layers.Dense(3, **options)


def normalized(layer, **options):
    return keras.Sequential([dense(), layer(name="inner_norm", **options), dense()])


REGRESSION = {"task": "regression"}
TAPE = {"inner_loop": "tape"}
DUAL = {"inner_loop": "dual"}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: keras.layers.Dense(1), {}, r'at least two classes.*task="regression"'),
        (lambda: dense(activation="softmax"), {}, "must return logits"),
        (lambda: keras.Sequential([ending_in(ops.softmax)]), {}, "logits.*pass through"),
        (lambda: keras.layers.Reshape((2, 2)), {}, "of shape .batch, classes.*2, 2"),
        (lambda: ending_in(lambda x: [x, x]), REGRESSION, r"one output.*\[\(None, 3\), "),
        (lambda: normalized(keras.layers.Dropout, rate=0.5), DUAL, "Dropout"),
        (lambda: keras.Sequential([keras.layers.ReLU()]), DUAL, "activations for .*ReLU"),
        (lambda: dense(activation=keras.layers.PReLU()), DUAL, "activation=<PReLU"),
        (lambda: normalized(keras.layers.BatchNormalization), {}, "inner_norm/moving_mean"),
        (lambda: ending_in(dense(dtype="float16")), TAPE, "or wider on the nested tape"),
        (lambda: dense(activity_regularizer="l2"), {}, "without activity regularizers"),
        (lambda: dense(lora_rank=2), {}, "plain kernels.*<Dense name"),
        (str, {}, "`head` must be a Keras layer"),
        (None, {"dictionary": 0}, "`dictionary` must be a positive integer"),
        (None, {"inner_steps": 0}, "`inner_steps` must be a positive integer"),
        (None, {"inner_learning_rate": -1.0}, "`inner_learning_rate` must be a finite"),
        (None, {"learning_rate_form": "matrix"}, "`learning_rate_form` must be one of"),
        (None, {"task": "ranking"}, "`task` must be one of 'classification', 'regression'"),
        (None, {"inner_loop": "fast"}, "`inner_loop` must be one of 'auto', 'dual'"),
        (None, {"steps": 2}, "Unrecognized keyword arguments.*Head: {'steps': 2}"),
    ],
)
def test_errors(make, options, message):
    with refused(message):
        head = CosineDense(3) if make is None else make()
        MetaNeighborhoodHead(head, **{"dictionary": 4, **options}).build((None, 4))


@pytest.mark.parametrize("inner_loop", ["dual", "tape"])
def test_frozen_layers_adapt(inner_loop):
    head = stacked((4,), keras.layers.Dense(5, "tanh"), dense())
    layer, x = MetaNeighborhoodHead(head, 6, inner_loop=inner_loop), normal(7, 4)
    expected = layer(x)
    head.layers[0].trainable = False
    again = MetaNeighborhoodHead(head, layer.dictionary, inner_loop=inner_loop)
    assert_close(again(x), expected)
    assert [each.trainable for each in head.layers] == [False, True]
    assert len(again.trainable_variables) == len(layer.trainable_variables)


@pytest.mark.skipif(not heads.IS_TENSORFLOW, reason="TensorFlow's alone")
def test_checkpoints_of_tensorflow_hold_learned_rates(tmp_path):
    import tensorflow as tf

    layer, again = (heads.build("linear", learning_rate_form="diagonal") for _ in range(2))
    randomize(layer)
    path = tf.train.Checkpoint(layer).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(again).read(path).assert_consumed()
    np.testing.assert_equal(layer.get_weights(), again.get_weights())


def test_changed_kernels_are_refused_after_build_too():
    """Their own variables are not finetuned, so that adaptation would be another."""
    model, x = nsl_keras.MetaNeighborhoodModel(None, dense(), 6), normal(7, 4)
    model.predict(x, verbose=0)
    model.head.quantize("int8")
    assert model(x, adapt=False).shape == (7, 3)
    for use in (model, lambda x: model.predict(x, verbose=0)):
        with refused("plain kernels, without LoRA or quant"):
            use(x)


def test_what_needs_a_built_layer():
    with refused("`adapted_weights` needs a built layer"):
        MetaNeighborhoodHead(CosineDense(3), 8).adapted_weights(ops.ones((2, 4)))


@pytest.mark.jax
def test_integer_features():
    features, dictionary = np.arange(24).reshape(4, 6), NeighborDictionary(20)
    layer = MetaNeighborhoodHead(CosineDense(3), dictionary)
    np.testing.assert_array_equal(layer(features), layer(features.astype("float32")))


def test_errors_of_neighbors():
    layer = heads.build("linear")
    for options in ({"k": heads.ENTRIES + 1}, {"k": 0}, {"by": "weight"}):
        with refused(f"`{next(iter(options))}` must be"):
            layer.neighbors(heads.features(), **options)
    with refused(r"`features.shape` must be .*\(3, 4\)"):
        layer.neighbors(ops.ones((3, 4)))


def test_neighbors_in_half_precision():
    layer = MetaNeighborhoodHead(keras.layers.Dense(3), 5, dtype="bfloat16")
    layer.build((None, 4))
    found = layer.neighbors(ops.ones((2, 4), dtype="bfloat16"), k=2, effects=True)
    assert tuple(found.output_changes.shape) == (2, 2, 3)
