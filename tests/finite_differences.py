"""Gradients of layers against central differences."""

import keras
import numpy as np
from helpers import assert_close, gradients
from keras import ops


def check_gradients(layer, inputs, dtype, step, tolerance, training=None, skip=()):
    """Central differences of a scalar of the output, along random directions."""
    rng = np.random.default_rng(5)
    cotangent = ops.cast(rng.normal(size=layer.compute_output_shape(inputs.shape)), dtype)

    def scalar(inputs):
        return ops.sum(layer(inputs, training=training) * cotangent)

    variables = [v for v in layer.trainable_variables if v.name not in skip]
    found = gradients(scalar, [inputs], variables)
    points = [inputs, *(ops.convert_to_tensor(v) for v in variables)]

    def value(at):
        mapping = list(zip(variables, at[1:], strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return float(ops.convert_to_numpy(scalar(at[0])))

    for index, (point, gradient) in enumerate(zip(points, found, strict=True)):
        name = "input" if index == 0 else variables[index - 1].path
        gradient = np.asarray(ops.convert_to_numpy(gradient), "float64")
        expected, received = [], []
        # One is enough in float64; in float32 the largest of three sets the scale.
        for _ in range(1 if dtype == "float64" else 3):
            direction = rng.normal(size=point.shape)
            shift = ops.cast(step * direction, dtype)
            above, below = list(points), list(points)
            above[index], below[index] = point + shift, point - shift
            expected.append((value(above) - value(below)) / (2 * step))
            received.append(np.sum(gradient * direction))
        assert_close(received, expected, tolerance, name)
