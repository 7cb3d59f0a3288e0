"""The hyperspherical dense layer, against the convolution and plain loops."""

import numpy as np
import pytest
from golden_files import DTYPES, gradients
from keras import ops

from nsl_keras.layers import SphereConv2D, SphereDense

INPUTS = np.random.default_rng(5).normal(size=(3, 2, 7))
INPUTS[0, 1] = 0
RESPONSES = ("cosine", "linear", "sigmoid", "learnable_sigmoid")


def inputs(dtype="float32"):
    return ops.convert_to_tensor(INPUTS, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", ["input", "kernel", "both"])
def test_values(normalize, dtype):
    layer = SphereDense(5, "relu", True, bias_initializer="ones", normalize=normalize)
    layer = SphereDense.from_config({**layer.get_config(), "dtype": dtype})
    received = ops.convert_to_numpy(layer(inputs(dtype)))
    kernel = ops.convert_to_numpy(layer.kernel).astype("float64")
    expected = INPUTS @ kernel
    if normalize != "kernel":
        expected /= np.sqrt(np.sum(INPUTS**2, axis=-1, keepdims=True) + 1e-4)
    if normalize != "input":
        expected /= np.sqrt(np.sum(kernel**2, axis=0) + 1e-4)
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(received, np.maximum(expected + 1, 0), atol=tolerance)


@pytest.mark.parametrize("response", RESPONSES)
def test_is_the_convolution_of_one_pixel(response):
    dense = SphereDense(5, use_bias=True, response=response)
    dense.build((None, None, 7))
    dense.bias.assign(np.arange(5.0))
    if response == "learnable_sigmoid":
        dense.curvature.assign([-0.4, 0.0, 0.2, 0.7, 3.0])
    convolution = SphereConv2D(5, 1, use_bias=True, response=response)
    convolution.build((None, None, None, 7))
    for ours, theirs in zip(dense.weights, convolution.weights, strict=True):
        theirs.assign(ops.reshape(ours, theirs.shape))
    received = ops.convert_to_numpy(dense(inputs()))
    expected = ops.convert_to_numpy(convolution(inputs()[:, :, None]))[:, :, 0]
    np.testing.assert_allclose(received, expected, atol=1e-6)
    assert np.ptp(received - np.arange(5)) > 0.5


@pytest.mark.parametrize("response", RESPONSES)
@pytest.mark.parametrize("value", [0.0, 0.7])
def test_second_derivatives_at_constant_inputs_are_finite(value, response):
    layer = SphereDense(5, response=response)
    constant = value * ops.ones((2, 7))
    layer.build(constant.shape)

    def squared_slope(constant):
        slopes = gradients(
            lambda constant: ops.sum(layer(constant) + ops.square(layer(constant))),
            [constant],
            layer.trainable_variables,
        )
        return sum(ops.sum(ops.square(slope)) for slope in slopes)

    assert np.all(np.isfinite(ops.convert_to_numpy(layer(constant))))
    for gradient in gradients(squared_slope, [constant], layer.trainable_variables):
        assert np.all(np.isfinite(ops.convert_to_numpy(gradient)))


def test_half_precision_takes_norms_in_float32():
    layer = SphereDense(5, normalize="input", dtype="mixed_float16")
    large = ops.cast(200 * (ops.abs(inputs()) + 1), "float16")
    received = ops.convert_to_numpy(layer(large))
    reference = SphereDense(5, normalize="input")
    reference.build(large.shape)
    reference.kernel.assign(layer.kernel)
    expected = ops.convert_to_numpy(reference(ops.cast(large, "float32")))
    assert received.dtype == "float16"
    np.testing.assert_allclose(received, expected, atol=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"units": 0}, r"`units` must be .*units=0"),
        ({"normalize": "all"}, r"`normalize` must be one of .*normalize='all'"),
        ({"response": "relu"}, r"`response` must be one of .*response='relu'"),
        (
            {"normalize": "kernel", "response": "sigmoid"},
            r"`normalize` must be 'both' .*response='sigmoid'",
        ),
    ],
)
def test_errors_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        SphereDense(**{"units": 5, **arguments})


def test_errors_of_shapes():
    with pytest.raises(ValueError, match="last axis of the input must be known"):
        SphereDense(5).build((2, None))
    layer = SphereDense(5)
    layer(inputs())
    with pytest.raises(ValueError, match=r"expected axis -1 .* value 7"):
        layer(ops.ones((2, 6)))


def test_integer_inputs():
    inputs = np.arange(12).reshape(3, 4)
    layer = SphereDense(5)
    expected = layer(inputs.astype("float32"))
    received = ops.convert_to_numpy(layer(inputs))
    np.testing.assert_array_equal(received, ops.convert_to_numpy(expected))
