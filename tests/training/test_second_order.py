"""Which layers TensorFlow does not differentiate twice: the list is still needed."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from nsl_keras.training.second_order import INTERPOLATIONS, require_second_derivatives


def graph(operation, shape):
    """A functional model of an operation, which is nested in another one."""
    inputs = keras.Input(shape)
    inner = keras.Model(inputs, operation(inputs))
    return keras.Model(inputs, inner(inputs))


INEXACT = {
    "layer_normalization": (layers.LayerNormalization, (5,)),
    "group_normalization": (lambda: layers.GroupNormalization(2), (4, 4, 4)),
    "resizing": (lambda: layers.Resizing(7, 5), (4, 4, 2)),
    "enlarging_crop": (lambda: layers.CenterCrop(6, 6), (4, 4, 2)),
    "softsign": (lambda: layers.Dense(3, "softsign"), (5,)),
    "activation_softsign": (lambda: layers.Activation("softsign"), (5,)),
    "operation_softsign": (lambda: graph(ops.softsign, (5,)), (5,)),
    "operation_layer_normalization": (
        lambda: graph(lambda x: ops.layer_normalization(x, axis=-1), (5,)),
        (5,),
    ),
    "operation_moments": (
        lambda: graph(lambda x: ops.moments(x, axes=[1])[1], (5,)),
        (5,),
    ),
    "operation_resizing": (
        lambda: graph(lambda x: ops.image.resize(x, (7, 5)), (4, 4, 2)),
        (4, 4, 2),
    ),
    "resizing_nearest": (lambda: layers.Resizing(7, 5, "nearest"), (4, 4, 2)),
    **{
        f"up_sampling_{name}": (
            lambda name=name: layers.UpSampling2D(2, interpolation=name),
            (4, 4, 2),
        )
        for name in INTERPOLATIONS
    },
}
pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="TensorFlow's derivatives"
)


def second_derivative_error(layer, shape, dtype="float64"):
    """Error of a second derivative of a layer, against a difference of gradients.

    Along a direction of its input and weights, of the gradient of `sum(tanh(f(x)))`.
    """
    import tensorflow as tf

    layer.build((2, *shape))
    random = np.random.default_rng(0)
    start = [random.normal(size=(2, *shape)), *layer.get_weights()]
    start = [tf.constant(value, dtype) for value in start]
    along = [tf.constant(random.normal(size=value.shape), dtype) for value in start]

    def gradients(at):
        with tf.GradientTape() as tape:
            tape.watch(at)
            with keras.StatelessScope(
                state_mapping=list(zip(layer.weights, at[1:], strict=True))
            ):
                value = tf.reduce_sum(tf.tanh(layer(at[0])))
        found = tape.gradient(value, at, unconnected_gradients="zero")
        return sum(
            tf.reduce_sum(each * way) for each, way in zip(found, along, strict=True)
        )

    with tf.GradientTape() as tape:
        tape.watch(start)
        slope = gradients(start)
    try:
        second = tape.gradient(slope, start, unconnected_gradients="zero")
    except LookupError:  # TensorFlow's answer for some operations.
        return 1.0
    found = sum(tf.reduce_sum(each * way) for each, way in zip(second, along, strict=True))
    step = 1e-5
    ahead, back = (
        gradients(
            [value + sign * step * way for value, way in zip(start, along, strict=True)]
        )
        for sign in (1, -1)
    )
    expected = float(ahead - back) / (2 * step)
    return abs(float(found) - expected) / (1e-3 + abs(expected))


@pytest.fixture(autouse=True)
def _float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


@pytest.mark.parametrize("name", INEXACT)
def test_listed_layers_are_inexact_and_refused(name):
    """Fails once Keras or TensorFlow mends a layer, which then leaves the list."""
    make, shape = INEXACT[name]
    # TensorFlow resizes by Lanczos kernels in float32 alone.
    dtype = "float32" if "lanczos" in name else "float64"
    keras.config.set_dtype_policy(dtype)
    layer = make()
    assert second_derivative_error(layer, shape, dtype) > 2e-3
    with pytest.raises(ValueError, match=r"second derivatives are exact.* Received: layer"):
        require_second_derivatives(layer)


def test_the_error_of_an_exact_layer_is_small():
    """So that the errors above are those of the layers."""
    assert second_derivative_error(layers.Dense(3, "tanh"), (5,)) < 1e-5


def test_layers_inside_models_are_found():
    inner = keras.Sequential([layers.Dense(3), layers.LayerNormalization(name="inside")])
    model = keras.Sequential([keras.Input((4,)), inner, layers.Dense(2)])
    with pytest.raises(ValueError, match=r"`head` must .*, or wait\. Received: .*'inside'"):
        require_second_derivatives(model, argument="head", remedy=", or wait")
    require_second_derivatives(keras.Sequential([keras.Input((4,)), layers.Dense(3)]))
