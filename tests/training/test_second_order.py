"""Which layers TensorFlow does not differentiate twice: the list is still needed."""

import keras
import numpy as np
import pytest
from helpers import IS_TENSORFLOW, gradients
from keras import layers, ops

from nsl_keras.training.second_order import INTERPOLATIONS, require_second_derivatives


def graph(operation, shape):
    """A functional model of an operation, which is nested in another one."""
    inputs = keras.Input(shape)
    inner = keras.Model(inputs, operation(inputs))
    return keras.Model(inputs, inner(inputs))


OPERATIONS = {
    "softsign": (ops.softsign, (5,)),
    "layer_normalization": (lambda x: ops.layer_normalization(x, axis=-1), (5,)),
    "moments": (lambda x: ops.moments(x, axes=[1])[1], (5,)),
    "resizing": (lambda x: ops.image.resize(x, (7, 5)), (4, 4, 2)),
}
INEXACT = {
    "layer_normalization": (layers.LayerNormalization, (5,)),
    "group_normalization": (lambda: layers.GroupNormalization(2), (4, 4, 4)),
    "resizing": (lambda: layers.Resizing(7, 5), (4, 4, 2)),
    "enlarging_crop": (lambda: layers.CenterCrop(6, 6), (4, 4, 2)),
    "softsign": (lambda: layers.Dense(3, "softsign"), (5,)),
    "activation_softsign": (lambda: layers.Activation("softsign"), (5,)),
    **{
        f"operation_{name}": (lambda call=call, shape=shape: graph(call, shape), shape)
        for name, (call, shape) in OPERATIONS.items()
    },
    "resizing_nearest": (lambda: layers.Resizing(7, 5, "nearest"), (4, 4, 2)),
    **{
        f"up_sampling_{name}": (
            lambda name=name: layers.UpSampling2D(2, interpolation=name),
            (4, 4, 2),
        )
        for name in INTERPOLATIONS
    },
}
pytestmark = [
    pytest.mark.skipif(not IS_TENSORFLOW, reason="TensorFlow's derivatives"),
    pytest.mark.usefixtures("float64"),
]


def second_derivative_error(layer, shape, dtype="float64"):
    """Error of a second derivative of a layer, against a difference of gradients.

    Along a direction of its input and weights, of the gradient of `sum(tanh(f(x)))`.
    """
    layer.build((2, *shape))
    random = np.random.default_rng(0)
    start = [random.normal(size=(2, *shape)), *layer.get_weights()]
    along = [random.normal(size=value.shape) for value in start]
    start, along = ([ops.cast(each, dtype) for each in some] for some in (start, along))

    def value(inputs, *weights):
        mapping = list(zip(layer.weights, weights, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return ops.sum(ops.tanh(layer(inputs)))

    def derivative(function, at):
        pairs = zip(gradients(function, at), along, strict=True)
        return sum(ops.sum(gradient * way) for gradient, way in pairs)

    derivative(value, start)  # The first derivative exists.
    try:
        found = derivative(lambda *at: derivative(value, at), start)
    except (LookupError, RuntimeError):  # TensorFlow's for some operations, and ours.
        return 1.0
    step = 1e-5
    ahead, back = (
        derivative(value, [x + shift * way for x, way in zip(start, along, strict=True)])
        for shift in (step, -step)
    )
    expected = float(ahead - back) / (2 * step)
    return abs(float(found) - expected) / (1e-3 + abs(expected))


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
