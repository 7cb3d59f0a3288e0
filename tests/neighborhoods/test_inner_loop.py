"""The two inner loops agree with each other and with finite differences."""

import adapting_heads as heads
import keras
import numpy as np
import pytest
from finite_differences import at_values, check_scalar_gradients
from helpers import gradients

from nsl_keras.layers import MetaNeighborhoodHead


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        pytest.param(
            *(("cosine",), {"inner_steps": 3, "learning_rate_form": "diagonal"}),
            marks=pytest.mark.long,
        ),
        (("linear",), {"inner_steps": 2, "learning_rate_form": "diagonal"}),
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
    """Outputs, weights, and all gradients of an outer loss."""
    z = heads.features()
    found = []
    for inner_loop in ("dual", "tape"):
        layer = heads.build(*kinds, inner_loop=inner_loop, **options)
        assert layer.active_inner_loop == inner_loop

        def loss(z, layer=layer):
            return heads.outer_loss(layer, z)

        outer = gradients(loss, [z], layer.trainable_variables)
        found.append([layer(z), *layer.adapted_weights(z), *outer])
    heads.assert_close(*found, 1e-9)


@pytest.mark.skipif(not heads.IS_TENSORFLOW, reason="finite differences need float64")
@pytest.mark.parametrize(
    ("kind", "task", "inner_loop"),
    [
        ("cosine", "classification", "dual"),
        pytest.param("linear", "classification", "tape", marks=pytest.mark.long),
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
