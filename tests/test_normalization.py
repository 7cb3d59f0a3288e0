"""Batch norms by the statistics of a batch: in values, gradients and moving statistics."""

import keras
import numpy as np
import pytest
from keras import ops

from nsl_keras.backend import gradients_of
from nsl_keras.normalization import (
    BatchNormalization,
    NormalizationByBatch,
    normalizing_by_batch,
)

SHAPES = {
    "images": ((5, 4, 3, 6), {"epsilon": 0.1}),
    "no scale": ((5, 4, 3, 6), {"scale": False, "axis": 3}),
    "no offset": ((5, 4, 3, 6), {"center": False}),
    "channels first": ((5, 4, 3, 6), {"axis": 1}),
    "vectors": ((5, 6), {}),
}


def filled(layer, shape):
    layer.build(shape)
    rng = np.random.default_rng(0)
    for weight in layer.weights:
        weight.assign(rng.uniform(0.5, 2, size=weight.shape))
    return layer


def results(layer, weights, inputs, **arguments):
    """Gradients of a weighted sum of the outputs, these, and the statistics left."""
    norm = getattr(layer, "normalization", layer)

    def total(at):
        with keras.StatelessScope() as scope:
            outputs = layer(at[0], **arguments)
            mean = scope.get_current_value(norm.moving_mean)
            variance = scope.get_current_value(norm.moving_variance)
        return ops.sum(weights * outputs), [outputs, mean, variance]

    gradients, rest = gradients_of(total, [ops.convert_to_tensor(inputs)])
    return [*gradients, *rest]


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("second_order", [False, True])
def test_it_is_the_training_mode_of_keras(case, second_order):
    shape, options = SHAPES[case]
    rng = np.random.default_rng(1)
    inputs = rng.normal(2, 3, size=shape).astype("float32")
    weights = rng.normal(size=shape).astype("float32")
    reference = keras.layers.BatchNormalization(momentum=0.0, **options)
    expected = results(filled(reference, shape), weights, inputs, training=True)
    ours = filled(BatchNormalization(**options), shape)
    stand_in = NormalizationByBatch(
        filled(keras.layers.BatchNormalization(**options), shape)
    )
    for layer, arguments in ((ours, {"training": False}), (stand_in, {})):
        with normalizing_by_batch(second_order):
            found = results(layer, weights, inputs, **arguments)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_second_derivatives():
    """The penalty of a gradient, by finite differences."""
    shape = (7, 3)
    rng = np.random.default_rng(1)
    inputs, weights, direction = rng.normal(size=(3, *shape)).astype("float32")
    layer = filled(BatchNormalization(), shape)

    def gradient(at):
        total, _ = gradients_of(lambda at: (ops.sum(weights * layer(at[0]) ** 2), None), at)
        return total[0]

    with keras.StatelessScope(), normalizing_by_batch():
        at = [ops.convert_to_tensor(inputs)]
        (found,), _ = gradients_of(lambda at: (ops.sum(gradient(at) ** 2), None), at)
        above, below = (
            float(ops.sum(gradient([inputs + step * direction]) ** 2))
            for step in (1e-2, -1e-2)
        )
    received = float(np.sum(ops.convert_to_numpy(found) * direction))
    np.testing.assert_allclose(received, (above - below) / 2e-2, rtol=1e-2)


@pytest.mark.parametrize("trainable", [False, True])
def test_without_a_request_and_frozen_it_is_that_of_keras(trainable):
    shape = (5, 6)
    inputs = np.random.default_rng(1).normal(2, 3, size=shape).astype("float32")
    reference = filled(keras.layers.BatchNormalization(trainable=trainable), shape)
    layer = filled(BatchNormalization(trainable=trainable), shape)
    for training in (False, True):
        np.testing.assert_array_equal(
            layer(inputs, training=training), reference(inputs, training=training)
        )
    stand_in = NormalizationByBatch(reference)
    np.testing.assert_array_equal(stand_in(inputs), reference(inputs))
    if not trainable:
        with normalizing_by_batch():
            for each in (layer, stand_in):
                np.testing.assert_array_equal(each(inputs), reference(inputs))


def test_masks_and_second_calls_are_refused():
    inputs = np.ones((2, 3, 4), "float32")
    layer = filled(BatchNormalization(name="norm"), inputs.shape)
    with keras.StatelessScope(), normalizing_by_batch(once=True):
        layer(inputs)
        with pytest.raises(ValueError, match="layer 'norm', which is called more often"):
            layer(inputs)
    with normalizing_by_batch(), pytest.raises(ValueError, match="not have masked inputs"):
        layer(inputs, mask=np.ones((2, 3), bool))
