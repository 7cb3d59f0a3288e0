"""The two inner loops: beside each other, in chunks, and beside finite differences."""

import functools

import adapting_heads as heads
import keras
import numpy as np
import pytest
from finite_differences import at_values, check_scalar_gradients
from helpers import gradients
from keras import ops

from nsl_keras.layers import MetaNeighborhoodHead
from nsl_keras.neighborhoods import dual_form


def computed(layer, training=False):
    """Outputs, weights, and all gradients of an outer loss."""
    z, call = heads.features(), functools.partial(layer, training=training)
    variables = layer.trainable_variables
    outer = gradients(lambda z: heads.outer_loss(call, z), [z], variables)
    return [layer(z), *layer.adapted_weights(z), *outer]


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        (
            ("tanh", keras.layers.ReLU(negative_slope=0.5), "cosine"),
            {"learning_rate_form": "fixed", "dictionary": {"learn_temperature": True}},
        ),
        (("tanh", "tanh", "linear"), {"task": "regression", "inner_steps": 2}),
        (
            ("relu", "gelu", "cosine"),
            {"use_bias": False, "dictionary": {"metric": "euclidean"}},
        ),
    ],
    ids=str,
)
def test_dual_form_and_tape_agree(kinds, options):
    found = []
    for inner_loop in ("dual", "tape"):
        layer = heads.build(*kinds, inner_loop=inner_loop, **options)
        assert layer.active_inner_loop == inner_loop
        found.append(computed(layer))
    heads.assert_close(*found, 1e-9)


def test_a_column_without_direction_stays_without():
    """As in `CosineDense`: its cosine is 0, and so is its gradient."""
    found = []
    for inner_loop in ("dual", "tape"):
        layer = heads.build("tanh", "cosine", inner_loop=inner_loop)
        kernel = layer.head.layers[-1].kernel
        kernel.assign(kernel * np.eye(heads.OUTPUTS)[0])
        found.append(computed(layer))
    heads.assert_close(*found, 1e-9, 1e-4)
    assert not ops.convert_to_numpy(found[0][0])[:, 1:].any()


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        (("cosine",), {"dictionary": {"dropout": 0.5, "metric": "euclidean"}}),
        (("linear",), {"inner_steps": 2, "dictionary": {"dropout_scope": "batch"}}),
        (("tanh", "cosine"), {"inner_steps": 2, "learning_rate_form": "diagonal"}),
    ],
    ids=str,
)
def test_chunks_change_nothing(kinds, options):
    """Chunks of 3 of 7 entries leave a rest."""
    found = []
    for chunk_size in (3, None):
        layer = heads.build(*kinds, **options)
        layer._finetuning.chunk_size = chunk_size
        found.append(computed(layer, training=True))
    heads.assert_close(*found, 1e-12, 1e-5)


def test_layers_as_activations_compute_in_full_precision():
    keras.config.set_dtype_policy("mixed_float16")
    slope = keras.layers.LeakyReLU(negative_slope=0.3)
    head = keras.Sequential([keras.layers.Dense(4), slope, keras.layers.ReLU()])
    head.build((None, 5))
    (stage,) = dual_form.stages_of(head)
    outputs = ops.array([1 + 2.0**-20, -2.0])
    np.testing.assert_array_equal(stage.activation(outputs), [1 + 2.0**-20, 0.0])


@pytest.mark.skipif(not heads.IS_TENSORFLOW, reason="finite differences need float64")
@pytest.mark.parametrize(
    ("kind", "task", "inner_loop"),
    [
        ("cosine", "classification", "dual"),
        ("linear", "regression", "dual"),
    ],
)
def test_outer_gradients_against_finite_differences(kind, task, inner_loop):
    """Values included: a fused inner loss would give a classifier's labels zeros."""
    layer = heads.build(kind, inner_steps=2, task=task, inner_loop=inner_loop)
    z, variables = heads.features(), layer.trainable_variables
    found = gradients(lambda z: heads.outer_loss(layer, z), [z], variables)[1:]
    loss, values = at_values(lambda: heads.outer_loss(layer, z), variables)
    check_scalar_gradients(loss, values, found, 1e-5, 1e-5)


def test_the_tape_treats_any_head():
    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(3)(keras.layers.Dense(5)(inputs) + inputs)
    layer = MetaNeighborhoodHead(keras.Model(inputs, outputs), 4, inner_steps=2)
    for count in (2, 0):  # A replica of `tf.distribute` may get an empty batch.
        assert layer(np.ones((count, 5), "float32")).shape == (count, 3)
    assert layer.active_inner_loop == "tape"
