"""The dual form in chunks of entries, and the heads that it treats."""

import adapting_heads as heads
import keras
import numpy as np
import pytest
from helpers import gradients
from keras import ops

from nsl_keras.neighborhoods import dual_form


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
    """In outputs, weights and all gradients; chunks of 3 of 7 entries leave a rest."""
    found, z = [], heads.features()
    for chunk_size in (3, None):
        layer = heads.build(*kinds, **options)
        layer._finetuning.chunk_size = chunk_size
        variables = layer.trainable_variables

        def loss(z, layer=layer):
            return ops.sum(ops.square(layer(z, training=True)))

        outer = gradients(loss, [z], variables)
        found.append([layer(z), *layer.adapted_weights(z), *outer])
    heads.assert_close(*found, 1e-12, 1e-5)


def test_a_column_without_direction_stays_without():
    """As in `CosineDense`: its cosine is 0, and so is its gradient."""
    found = []
    for inner_loop in ("dual", "tape"):
        layer = heads.build("tanh", "cosine", inner_loop=inner_loop, inner_steps=2)
        z = heads.features()
        kernel = layer.head.layers[-1].kernel
        kernel.assign(kernel * np.eye(heads.OUTPUTS)[0])
        variables = layer.trainable_variables
        found.append([layer(z), *gradients(lambda x: ops.sum(layer(x)), [z], variables)])
    heads.assert_close(*found, 1e-9, 1e-4)
    assert not ops.convert_to_numpy(found[0][0])[:, 1:].any()


def test_layers_as_activations_compute_in_full_precision():
    keras.config.set_dtype_policy("mixed_float16")
    slope = keras.layers.LeakyReLU(negative_slope=0.3)
    head = keras.Sequential([keras.layers.Dense(4), slope, keras.layers.ReLU()])
    head.build((None, 5))
    (stage,) = dual_form.stages_of(head)
    outputs = ops.array([1 + 2.0**-20, -2.0])
    np.testing.assert_array_equal(stage.activation(outputs), [1 + 2.0**-20, 0.0])
