"""Functions that stay apart inside other graphs."""

import keras
import numpy as np
import pytest

from nsl_keras.backend import apart

tensorflow_only = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="TensorFlow's graphs."
)


@tensorflow_only
def test_apart_is_a_call_in_the_graph_that_is_run():
    import tensorflow as tf

    def doubled(x):
        return 2 * x

    def calls_run(function):
        @tf.function
        def outer(x):
            return function(x) + 1

        number = tf.constant(1.0)
        graph = outer.get_concrete_function(number)
        definitions = graph.graph.as_graph_def().library.function
        assert float(outer(number)) == 3
        return [
            definition.attr["_noinline"].b
            for definition in definitions
            if "_noinline" in definition.attr
        ]

    assert calls_run(apart(doubled)) == [True]
    assert not calls_run(tf.function(doubled))


def test_apart_sees_what_it_closes_over():
    offset = keras.ops.convert_to_tensor(np.float32(3))
    assert float(apart(lambda x: x + offset)(keras.ops.ones(()))) == 4
