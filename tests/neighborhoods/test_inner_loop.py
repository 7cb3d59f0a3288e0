"""The two inner loops: beside each other, and in chunks."""

import functools

import adapting_heads as heads
import keras
import numpy as np
import pytest
from helpers import gradients, normal
from keras import ops

from nsl_keras import MetaNeighborhoodModel
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
            ("gelu", keras.layers.ReLU(negative_slope=0.5), "cosine"),
            {
                **{"learning_rate_form": "diagonal", "use_bias": False},
                "dictionary": {"metric": "euclidean", "learn_temperature": True},
            },
        ),
        (("tanh", "linear"), {"task": "regression", "inner_steps": 2}),
    ],
    ids=str,
)
def test_dual_form_and_tape_agree(kinds, options):
    """A column without direction stays so, as in `CosineDense`."""
    found = []
    for inner_loop in ("dual", "tape"):
        layer = heads.build(*kinds, inner_loop=inner_loop, **options)
        assert layer.active_inner_loop == inner_loop
        if "cosine" in kinds:
            kernel = layer.head.layers[-1].kernel
            kernel.assign(kernel * [1, 1, 0])
        found.append(computed(layer))
    heads.assert_close(*found, 1e-9)
    if "cosine" in kinds:
        outputs = ops.convert_to_numpy(found[0][0])
        assert outputs.any(axis=0).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        (("linear",), {"dictionary": {"dropout": 0.5}}),
        (("tanh", "cosine"), {"inner_steps": 2, "learning_rate_form": "diagonal"}),
    ],
    ids=str,
)
def test_chunks_change_nothing(kinds, options):
    """Chunks of 3 of 7 entries leave a rest."""
    found = []
    for chunk_size in (3, None):
        layer = heads.build(*kinds, **options)
        layer._inner_loop.chunk_size = chunk_size
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


class Doubled(keras.Sequential):
    def call(self, inputs, training=None, mask=None):
        return 2 * super().call(inputs)


@pytest.mark.parametrize("kind", [Doubled, keras.Sequential])
def test_a_head_is_what_it_computes_when_it_is_built(kind):
    head = kind([keras.layers.Dense(6, "relu")])
    layer = MetaNeighborhoodHead(head, heads.ENTRIES, inner_learning_rate=1e-9)
    head.add(keras.layers.Dense(heads.OUTPUTS))
    z = heads.features("float32")
    np.testing.assert_allclose(layer(z), layer(z, adapt=False), atol=1e-6)


def test_the_tape_treats_any_head(eager):
    inputs = keras.Input((5,))
    outputs = keras.layers.Dense(3)(keras.layers.Dense(5)(inputs) + inputs)
    model = MetaNeighborhoodModel(None, keras.Model(inputs, outputs), 4, inner_steps=2)
    x = normal(2, 5)
    np.testing.assert_allclose(model.predict(x, verbose=0), model(x), rtol=1e-4)
    # A replica of `tf.distribute` may get an empty batch.
    assert model(x[:0]).shape == (0, 3)
    assert model.neighborhood.active_inner_loop == "tape"
