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


def check_gradients(layer, inputs, dtype, step, tolerance, training=None, skip=()):
    """Those of a scalar of a layer's output, by inputs and variables."""
    rng = np.random.default_rng(5)
    cotangent = ops.cast(rng.normal(size=layer.compute_output_shape(inputs.shape)), dtype)

    def scalar(inputs):
        return ops.sum(layer(inputs, training=training) * cotangent)

    variables = [v for v in layer.trainable_variables if v.name not in skip]

    def value(at):
        return at_values(lambda: scalar(at[0]), variables)[0](at[1:])

    points = [inputs, *(ops.convert_to_tensor(v) for v in variables)]
    found = gradients(scalar, [inputs], variables)
    # One is enough in float64; in float32 the largest of three sets the scale.
    draws = 1 if dtype == "float64" else 3
    check_scalar_gradients(value, points, found, step, tolerance, draws=draws)


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
