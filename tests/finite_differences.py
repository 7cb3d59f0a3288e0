"""Gradients against central differences, along random directions."""

import keras
import numpy as np
from helpers import as_numpy, gradients
from keras import ops


def at_values(compute, variables):
    """What `compute` returns as a function of the values of variables, and the values."""

    def computed(values):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return compute()

    return computed, [ops.convert_to_tensor(variable) for variable in variables]


def check_gradients(layer, inputs, step, tolerance, skip=()):
    """Those of a scalar of a layer's outputs, of which none may be zero.

    The layer is in training mode, and computes in float64.
    """
    rng = np.random.default_rng(5)
    cotangent = rng.normal(size=layer.compute_output_shape(inputs.shape))

    def scalar(inputs):
        return ops.sum(layer(inputs, training=True) * cotangent)

    def value(at):
        with keras.StatelessScope(list(zip(variables, at[1:], strict=True))):
            return scalar(at[0])

    variables = [v for v in layer.trainable_variables if v.name not in skip]
    points = [inputs, *map(ops.convert_to_tensor, variables)]
    found = gradients(scalar, [inputs], variables)
    assert all(np.any(as_numpy(each)) for each in found)
    check_scalar_gradients(value, points, found, step, tolerance, rng)


def check_scalar_gradients(value, points, found, step, tolerance, rng):
    """Those found of a function of a list of tensors, along one direction of all."""
    directions = [rng.normal(size=each.shape) for each in found]
    expected = 0.0
    for sign in (1, -1):
        pairs = zip(points, directions, strict=True)
        moved = [point + sign * step * direction for point, direction in pairs]
        expected += sign * float(value(moved)) / (2 * step)
    pairs = zip(found, directions, strict=True)
    received = sum(np.sum(as_numpy(one) * other) for one, other in pairs)
    np.testing.assert_allclose(received, expected, rtol=tolerance)
