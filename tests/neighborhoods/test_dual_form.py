"""The dual form in chunks of entries, and the heads that it treats."""

import adapting_heads as heads
import keras
import numpy as np
import pytest
from helpers import assert_close, gradients, normal
from keras import ops

from nsl_keras.layers import CosineDense, MetaNeighborhoodHead
from nsl_keras.neighborhoods import dual_form


def results(kinds, chunk_size, options):
    """Outputs, weights and all gradients, with half of the entries dropped if asked."""
    layer, z = heads.build(*kinds, chunk_size=chunk_size, **options), heads.features()
    cotangent = normal(heads.BATCH, heads.OUTPUTS, seed=2, dtype=heads.DTYPE)

    def loss(z):
        return ops.sum(layer(z, training=True) * cotangent)

    found = gradients(loss, [z], layer.trainable_variables)
    return [*found, layer(z), *layer.adapted_weights(z)]


@pytest.mark.parametrize(
    ("kinds", "options", "chunk_sizes"),
    [
        (("cosine",), {"dictionary": {"dropout": 0.5, "metric": "euclidean"}}, (1, 4)),
        (
            ("linear",),
            {"inner_steps": 2, "dictionary": {"dropout": 0.5, "dropout_scope": "batch"}},
            (3,),
        ),
        (
            ("tanh", "linear", "cosine"),
            {"inner_steps": 2, "learning_rate_form": "diagonal", "use_bias": False},
            (3,),
        ),
    ],
    ids=str,
)
def test_chunks_change_nothing(kinds, options, chunk_sizes):
    """Chunks that leave a rest, and that hold one entry each."""
    whole = results(kinds, None, options)
    for chunk_size in chunk_sizes:
        heads.assert_close(results(kinds, chunk_size, options), whole, 1e-12, 1e-5)


def test_large_dictionaries_are_summed_in_chunks_by_themselves():
    found = []
    for chunk_size in (None, 1300):
        keras.utils.set_random_seed(0)
        layer = MetaNeighborhoodHead(CosineDense(4), 1300, chunk_size=chunk_size)
        layer.build((None, 5))
        layer.dictionary.keys.assign(normal(1300, 5))
        found.append(layer(normal(3, 5, seed=1)))
    assert_close(*found)


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
    head = keras.Sequential([keras.layers.Dense(4, slope), keras.layers.ReLU()])
    head.build((None, 5))
    (stage,) = dual_form.stages_of(head)
    outputs = ops.array([1 + 2.0**-20, -2.0])
    np.testing.assert_array_equal(stage.activation(outputs), [1 + 2.0**-20, 0.0])
