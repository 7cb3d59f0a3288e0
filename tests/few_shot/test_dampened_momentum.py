"""The rule of finetuning, on numbers worked out by hand."""

import keras
import numpy as np
import pytest
from keras import ops

from nsl_keras.few_shot import DampenedMomentum


def descend(rule, gradients, value=1.0, dtype="float32"):
    value = ops.convert_to_tensor(value, dtype)
    buffer = ops.zeros_like(value)
    for index, gradient in enumerate(gradients):
        gradient = ops.convert_to_tensor(gradient, dtype)
        value, buffer = rule.step(value, gradient, buffer, index)
    return float(value)


def test_neither_the_first_buffer_nor_one_without_momentum_is_dampened():
    # Buffers 1, 0.9 + 0.1 and again 1: three whole steps.
    rule = DampenedMomentum(weight_decay=0.0)
    assert descend(rule, [1.0] * 3) == pytest.approx(0.97, abs=1e-6)
    # Buffers 1, 0.9 + 0.2 and 0.99 + 0.3.
    assert descend(rule, [1.0, 2.0, 3.0]) == pytest.approx(1 - 0.0339, abs=1e-6)
    rule = DampenedMomentum(0.1, momentum=0.0, dampening=0.9, weight_decay=0.0)
    assert descend(rule, [1.0] * 3) == pytest.approx(0.7, abs=1e-6)
    # Without dampening: 1, 1.9 and 2.71.
    rule = DampenedMomentum(dampening=0.0, weight_decay=0.0)
    assert descend(rule, [1.0] * 3) == pytest.approx(1 - 0.0561, abs=1e-6)


def test_values_keep_their_dtype():
    if keras.backend.backend() == "jax":
        pytest.skip("JAX has no float64 unless it is told to")
    value = ops.convert_to_tensor(np.ones(2), "float64")
    rule = DampenedMomentum()
    first, buffer = rule.step(value, value, ops.zeros_like(value), 0)
    assert first.dtype == buffer.dtype == "float64"
    # 0.01 * (1 + 0.001), to more digits than float32 has.
    np.testing.assert_allclose(first, 1 - 0.01001, rtol=0, atol=1e-15)
    _, buffer = rule.step(value, value, value, 1)
    np.testing.assert_allclose(buffer, 0.9 + 0.1 * 1.001, rtol=0, atol=1e-15)


def test_wrong_arguments():
    wrong = {"learning_rate": -1, "momentum": 1, "dampening": -0.1, "weight_decay": np.nan}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            DampenedMomentum(**{name: value})
