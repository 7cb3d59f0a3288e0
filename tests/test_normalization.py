"""The fused batch norm is Keras's, in values, gradients and moving statistics."""

import keras
import numpy as np
import pytest
from keras import ops

from nsl_keras.backend import fused_batch_normalization, gradients_of
from nsl_keras.normalization import FusedBatchNormalization


def pair(shape, **options):
    layers = [
        keras.layers.BatchNormalization(**options),
        FusedBatchNormalization(**options),
    ]
    rng = np.random.default_rng(0)
    for layer in layers:
        layer.build(shape)
    for ours, theirs in zip(layers[0].weights, layers[1].weights, strict=True):
        value = rng.uniform(0.5, 2, size=ours.shape)
        ours.assign(value)
        theirs.assign(value)
    return layers


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((5, 4, 3, 6), {"momentum": 0.7, "epsilon": 0.1}),
        ((5, 4, 3, 6), {"momentum": 0.0, "scale": False, "axis": 3}),
        ((5, 4, 3, 6), {"center": False}),
        ((5, 4, 3, 6), {"axis": 1}),
        ((5, 4, 3, 6), {"trainable": False}),
        ((5, 6), {}),
    ],
)
def test_fused_is_keras(shape, options):
    inputs = np.random.default_rng(1).normal(2, 3, size=shape).astype("float32")
    weights = np.random.default_rng(2).normal(size=shape).astype("float32")
    results = []
    for layer in pair(shape, **options):

        def total(at, layer=layer):
            outputs = layer(at[0], training=True)
            return ops.sum(weights * outputs), outputs

        with keras.StatelessScope() as scope:
            gradients, outputs = gradients_of(total, [ops.convert_to_tensor(inputs)])
            moving = [scope.get_current_value(each) for each in layer.weights]
        values = [
            layer.weights[i] if each is None else each for i, each in enumerate(moving)
        ]
        results.append([outputs, *gradients, *values, layer(inputs)])
    for keras_value, value in zip(*results, strict=True):
        np.testing.assert_allclose(
            ops.convert_to_numpy(value), ops.convert_to_numpy(keras_value), atol=1e-5
        )


def test_statistics():
    images = np.random.default_rng(1).normal(2, 3, size=(2, 2, 1, 3)).astype("float32")
    arguments = (ops.convert_to_tensor(images), ops.ones(3), ops.zeros(3), 1e-3)
    _, mean, variance = fused_batch_normalization(*arguments)
    np.testing.assert_allclose(mean, images.mean(axis=(0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(variance, images.var(axis=(0, 1, 2)), rtol=1e-5)
