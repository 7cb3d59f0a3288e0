"""All formulations that are timed against one another compute the same."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

import tensorflow as tf

from benchmarks import formulations

RNG = np.random.default_rng(6)


@pytest.mark.parametrize(
    ("similarity", "name"),
    [("diagonal", name) for name in formulations.DIAGONAL]
    + [("unconstrained", name) for name in formulations.UNCONSTRAINED],
)
def test_values_and_gradients(similarity, name):
    group, shape = {
        "diagonal": (formulations.DIAGONAL, (9,)),
        "unconstrained": (formulations.UNCONSTRAINED, (9, 9)),
    }[similarity]
    arguments = [
        tf.constant(RNG.normal(size=shape), "float32")
        for shape in [(2, 5, 4, 3), (3, 3, 3, 6), (2, 5, 4, *shape)]
    ]

    def values_and_gradients(function):
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            outputs = function(*arguments)
            curved = tf.reduce_sum(tf.sin(outputs))
        return [outputs, *tape.gradient(curved, arguments)]

    received = values_and_gradients(group[name])
    expected = values_and_gradients(group["nsl_keras"])
    for ours, theirs in zip(received, expected, strict=True):
        scale = np.abs(theirs).max()
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * scale)
