"""The measured error of second derivatives: of exact, inexact and missing ones."""

import keras
import numpy as np
import pytest
from helpers import IS_TENSORFLOW
from keras import layers, ops

from nsl_keras.few_shot import check_second_order


class WithInexactGradient(layers.Layer):
    """Its gradient is right, and a constant: it has no derivative."""

    def call(self, inputs):
        slope = ops.stop_gradient(2 * inputs)
        square = ops.stop_gradient(inputs**2)
        return square + slope * (inputs - ops.stop_gradient(inputs))


def error(*stack, shape=(4, 4, 2), **options):
    ends = layers.Flatten(), layers.Dense(3, "tanh")
    first = layers.Dense(2, "tanh")
    model = keras.Sequential([keras.Input(shape), first, *stack, *ends])
    x = np.random.default_rng(0).normal(size=(2, *shape))
    return check_second_order(model, x, **options)


def test_exact_derivatives():
    assert error(layers.Conv2D(3, 3, activation="softplus")) < 0.01
    assert error(layers.ReLU(), layers.MaxPooling2D(), step=1e-4) < 0.1


def test_inexact_derivatives():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2), WithInexactGradient()])
    # Of the curvature of y^4, 12 y^2, it lacks that of the inner square, 4 y^2.
    found = check_second_order(model, np.ones((2, 3)))
    np.testing.assert_allclose(found, 1 / 3, rtol=1e-3)


@pytest.mark.skipif(not IS_TENSORFLOW, reason="JAX differentiates resizing")
def test_missing_derivatives(float64):
    assert error(layers.ReLU(), step=1e-6) < 1e-6
    try:
        found = error(layers.Resizing(7, 5), step=1e-6)
    except (LookupError, RuntimeError):
        return
    assert found > 0.05


def test_unbuilt_models():
    with pytest.raises(ValueError, match="`check_second_order` needs a built layer"):
        check_second_order(keras.Sequential([layers.Dense(2)]), np.ones((2, 3)))
