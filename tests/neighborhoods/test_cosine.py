"""The cosine classifier."""

import numpy as np
from helpers import as_numpy, assert_close, assert_equal, gradients, normal, refusing
from keras import ops

from nsl_keras.layers import CosineDense


def test_cosines():
    layer, z = CosineDense(3, scale=7.0), normal(4, 5)
    received = layer(z)
    kernel = as_numpy(layer.kernel)
    lengths = np.linalg.norm(z, axis=1)[:, None] * np.linalg.norm(kernel, axis=0)
    assert_close(received, 7 * (z @ kernel) / lengths)
    assert_close(layer(100 * z), received)  # Lengths do not matter.


def test_zero_rows_have_no_gradient():
    """They have no direction: the formula's gradient of 1e6 would ruin a training."""
    layer, z = CosineDense(3), ops.zeros((2, 5))
    assert_equal(layer(z), np.zeros((2, 3)))
    found = gradients(lambda z: ops.sum(layer(z)), [z], layer.trainable_variables)
    assert not any(np.any(as_numpy(gradient)) for gradient in found)


test_errors = refusing(
    (lambda: CosineDense(0), "`units` must be a positive integer"),
    (lambda: CosineDense(3, scale=0.0), "`scale` must be a finite number above zero"),
    (lambda: CosineDense(3).build((2, None)), "must be known at the last axis"),
)
