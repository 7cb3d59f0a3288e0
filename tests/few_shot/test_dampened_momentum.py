"""The rule of finetuning, on numbers worked out by hand."""

import numpy as np
import pytest
from helpers import DTYPES
from keras import ops

from nsl_keras.few_shot import DampenedMomentum


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps(dtype):
    """Neither the first buffer nor one without momentum is dampened."""

    def check(rule, gradients, expected):
        value = ops.convert_to_tensor(1.0, dtype)
        buffer = ops.zeros_like(value)
        for index, gradient in enumerate(gradients):
            gradient = ops.convert_to_tensor(gradient, dtype)
            value, buffer = rule.step(value, gradient, buffer, index)
        assert value.dtype == buffer.dtype == dtype
        atol = 1e-15 if dtype == "float64" else 1e-6
        np.testing.assert_allclose(value, expected, rtol=0, atol=atol)

    # Buffers 1, 0.9 + 0.1 and again 1: three whole steps.
    check(DampenedMomentum(weight_decay=0.0), [1.0] * 3, 0.97)
    # Buffers 1, 0.9 + 0.2 and 0.99 + 0.3.
    check(DampenedMomentum(weight_decay=0.0), [1.0, 2.0, 3.0], 1 - 0.0339)
    rule = DampenedMomentum(0.1, momentum=0.0, dampening=0.9, weight_decay=0.0)
    check(rule, [1.0] * 3, 0.7)
    # Without dampening: 1, 1.9 and 2.71.
    check(DampenedMomentum(dampening=0.0, weight_decay=0.0), [1.0] * 3, 1 - 0.0561)
    # A gradient of 1 + 0.001 * 1.
    check(DampenedMomentum(), [1.0], 1 - 0.01001)


def test_wrong_arguments():
    wrong = {"learning_rate": -1, "momentum": 1, "dampening": -0.1, "weight_decay": np.nan}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            DampenedMomentum(**{name: value})
