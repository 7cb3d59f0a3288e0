"""What the benchmarks of the head call the authors' way is the same computation."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("the benchmarks run on TensorFlow", allow_module_level=True)

import tensorflow as tf

from benchmarks import head


def test_one_example_at_a_time_is_the_head():
    layer = head.neighborhood_head(entries=30)
    features = tf.random.stateless_normal((4, head.FEATURES), seed=(0, 1))
    layer.dictionary.keys.assign(np.random.default_rng(0).normal(size=(30, head.FEATURES)))
    expected = layer(features, training=False)
    layer.dictionary.dropout = 0.0
    mapped = head.OneExampleAtATime(layer)(features)
    np.testing.assert_allclose(mapped, expected, rtol=1e-4, atol=1e-5)
