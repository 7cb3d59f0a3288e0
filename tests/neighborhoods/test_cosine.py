"""The cosine classifier."""

import keras
import numpy as np
import pytest
from golden_files import gradients
from keras import ops

from nsl_keras.layers import CosineDense


def test_cosines():
    layer = CosineDense(3, scale=7.0)
    z = np.random.default_rng(0).normal(size=(4, 5)).astype("float32")
    received = ops.convert_to_numpy(layer(z))
    kernel = ops.convert_to_numpy(layer.kernel.value)
    lengths = np.linalg.norm(z, axis=1)[:, None] * np.linalg.norm(kernel, axis=0)
    np.testing.assert_allclose(received, 7 * (z @ kernel) / lengths, rtol=1e-4, atol=1e-5)
    # Lengths do not matter.
    np.testing.assert_allclose(layer(100 * z), received, rtol=1e-4, atol=1e-5)


def test_zero_rows_have_defined_values_and_gradients():
    layer = CosineDense(3)
    z = ops.zeros((2, 5))
    np.testing.assert_array_equal(layer(z), np.zeros((2, 3)))
    found = gradients(lambda z: ops.sum(layer(z)), [z], layer.trainable_variables)
    assert all(np.all(np.isfinite(ops.convert_to_numpy(g))) for g in found)


def test_bad_arguments():
    with pytest.raises(ValueError, match="`units` must be a positive integer"):
        CosineDense(0)
    with pytest.raises(ValueError, match="`scale` must be a finite number above zero"):
        CosineDense(3, scale=0.0)
    with pytest.raises(ValueError, match="last axis of the input must be known"):
        CosineDense(3).build((None, None))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_integers_are_taken_in_full_precision(dtype):
    if keras.backend.backend() == "jax" and dtype == "float64":
        pytest.skip("JAX computes in float32 unless its switch for float64 is on")
    keras.config.set_floatx(dtype)
    layer = CosineDense(3)
    integers = np.arange(8).reshape(2, 4)
    np.testing.assert_array_equal(
        ops.convert_to_numpy(layer(integers)),
        ops.convert_to_numpy(layer(integers.astype(dtype))),
    )
