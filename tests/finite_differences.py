"""Gradients against central differences, along random directions."""

import keras
import numpy as np
from helpers import as_numpy, gradients
from keras import ops


def at_values(compute, variables, **options):
    """What `compute` returns as a function of the values of variables, and the values."""

    def computed(values):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping, **options):
            return compute()

    return computed, [ops.convert_to_tensor(variable) for variable in variables]


def check_gradients(layer, inputs, step, tolerance, skip=()):
    """Those of a scalar of a layer's outputs, along one direction of all that they are of.

    The layer is in training mode, and computes in float64.
    """
    rng = np.random.default_rng(5)
    cotangent = rng.normal(size=layer.compute_output_shape(inputs.shape))

    def scalar(inputs):
        return ops.sum(layer(inputs, training=True) * cotangent)

    variables = [v for v in layer.trainable_variables if v.name not in skip]
    value, points = at_values(lambda: float(scalar(moved)), variables)
    found = [as_numpy(each) for each in gradients(scalar, [inputs], variables)]
    directions = [rng.normal(size=each.shape) for each in found]
    expected = 0.0
    for sign in (1, -1):
        moved, *others = (
            point + sign * step * direction
            for point, direction in zip([inputs, *points], directions, strict=True)
        )
        expected += sign * value(others) / (2 * step)
    products = [np.sum(one * two) for one, two in zip(found, directions, strict=True)]
    assert np.all(np.abs(products) > 0), products
    np.testing.assert_allclose(sum(products), expected, rtol=tolerance)


def check_scalar_gradients(value, points, found, step, tolerance, atol=0.0, draws=1):
    """Those found of a function of a list of tensors; `tolerance` is relative."""
    rng = np.random.default_rng(1)
    for place, (point, gradient) in enumerate(zip(points, found, strict=True)):
        expected, received = [], []
        for _ in range(draws):
            direction = rng.normal(size=point.shape)
            shift = ops.cast(step * direction, point.dtype)
            above, below = list(points), list(points)
            above[place], below[place] = point + shift, point - shift
            difference = float(as_numpy(value(above))) - float(as_numpy(value(below)))
            expected.append(difference / (2 * step))
            received.append(np.sum(as_numpy(gradient).astype("float64") * direction))
        largest = np.abs(expected).max()
        assert atol or largest > 0, place
        np.testing.assert_allclose(
            received, expected, rtol=0, atol=atol + tolerance * largest, err_msg=str(place)
        )
