"""Dynamic convolutions against their formula, written as one einsum over the taps."""

import functools

import keras
import numpy as np
import pytest
from keras import ops

from nsl_keras import similarities
from nsl_keras.backend import gradients_of
from nsl_keras.similarity.dynamic_convolution import (
    dynamic_convolution,
    dynamic_depthwise_convolution,
    windows,
)

RNG = np.random.default_rng(3)
SIMILARITIES = {
    "diagonal": similarities.Diagonal(),
    "unconstrained": similarities.Unconstrained(),
    "symmetric": similarities.Symmetric(),
}
#: JAX computes in float32 unless it is told otherwise before it starts.
DTYPE = "float64" if keras.backend.backend() == "tensorflow" else "float32"
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}[DTYPE]
GEOMETRIES = [
    # size, kernel, strides, padding, dilation
    pytest.param((7,), (3,), (1,), "causal", (2,), id="causal_dilated"),
    pytest.param((8,), (4,), (2,), "causal", (1,), id="causal_strided_even_kernel"),
    pytest.param((1,), (3,), (1,), "causal", (1,), id="causal_one_step"),
    pytest.param((7, 6), (3, 3), (1, 1), "same", (1, 1), id="same"),
    pytest.param((7, 6), (2, 3), (2, 1), "valid", (1, 1), id="valid_leaves_a_rest"),
    pytest.param((7, 6), (4, 2), (2, 3), "same", (1, 1), id="even_kernel_strided"),
    pytest.param((7, 6), (2, 3), (1, 1), "same", (3, 2), id="dilated_even_kernel"),
    pytest.param((7, 6), (3, 2), (2, 3), "valid", (2, 1), id="strided_and_dilated"),
    pytest.param((7, 6), (1, 1), (2, 3), "same", (1, 1), id="one_tap_strided"),
    pytest.param((2, 1), (3, 3), (2, 2), "same", (1, 1), id="kernel_above_image"),
    pytest.param((4, 5, 3), (2, 3, 2), (1, 2, 1), "same", (1, 1, 1), id="three_axes"),
]
GEOMETRY = ("size", "kernel_size", "strides", "padding", "dilation")
in_graphs = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="about TensorFlow's graphs"
)


def patches_of(inputs, kernel_size, strides, padding, dilation):
    """Any rank: zeros all round, and every number read from where it should lie."""
    before, lengths = [], []
    for size, k, s, d in zip(
        inputs.shape[1:-1], kernel_size, strides, dilation, strict=True
    ):
        reach = (k - 1) * d
        length = -(-size // s) if padding != "valid" else (size - reach - 1) // s + 1
        missing = max((length - 1) * s + reach + 1 - size, 0)
        before.append({"valid": 0, "causal": reach, "same": missing // 2}[padding])
        lengths.append(length)
    margin = 20
    padded = np.pad(inputs, [(0, 0), *[(margin, margin)] * len(lengths), (0, 0)])
    taps = []
    for tap in np.ndindex(*kernel_size):
        places = [
            margin - b + t * d + s * np.arange(length)
            for b, t, d, s, length in zip(
                before, tap, dilation, strides, lengths, strict=True
            )
        ]
        taps.append(padded[np.ix_(range(len(inputs)), *places, range(inputs.shape[-1]))])
    return np.stack(taps, axis=-2)


def expected_of(inputs, kernel, matrix, depthwise, *geometry_of):
    """`sum_t sum_u W[t,c,o] M[t,u] x[p,u,c]`, summed over `c` or not."""
    patches = patches_of(inputs, kernel.shape[:-2], *geometry_of)
    taps_first = kernel.reshape((-1, *kernel.shape[-2:]))
    if not depthwise:
        return np.einsum("tco,...tu,...uc->...o", taps_first, matrix, patches)
    outputs = np.einsum("tcm,...tu,...uc->...cm", taps_first, matrix, patches)
    return outputs.reshape((*outputs.shape[:-2], -1))


def arrays(size, kernel_size, strides, padding, dilation, name, per_example=False):
    """Inputs, a kernel and parameters for two examples of three channels."""
    inputs = RNG.normal(size=(2, *size, 3))
    kernel = RNG.normal(size=(*kernel_size, 3, 2))
    positions = patches_of(inputs, kernel_size, strides, padding, dilation).shape[1:-2]
    if per_example:
        positions = (1,) * len(positions)
    shape = SIMILARITIES[name].parameter_shape(int(np.prod(kernel_size)))
    return inputs, kernel, RNG.normal(size=(2, *positions, *shape))


def matrix_of(name, parameters):
    """`M` from its parameters."""
    if name == "diagonal":
        return parameters[..., None] * np.eye(parameters.shape[-1])
    if name == "symmetric":
        return (parameters + np.swapaxes(parameters, -1, -2)) / 2
    return parameters


def applied(depthwise, inputs, kernel, parameters, name, strides, padding, dilation):
    parameters = ops.convert_to_tensor(parameters)
    return (dynamic_depthwise_convolution if depthwise else dynamic_convolution)(
        ops.convert_to_tensor(inputs),
        ops.convert_to_tensor(kernel),
        functools.partial(SIMILARITIES[name].compare_windows, parameters),
        strides=strides,
        padding=padding,
        dilation_rate=dilation,
    )


@pytest.mark.parametrize(GEOMETRY, GEOMETRIES)
def test_windows(size, kernel_size, strides, padding, dilation):
    # Every pixel its own number: a shifted or swapped tap cannot go unseen.
    inputs = 1 + np.arange(2.0 * np.prod(size) * 3).reshape((2, *size, 3))
    expected = patches_of(inputs, kernel_size, strides, padding, dilation)
    inputs = ops.convert_to_tensor(inputs.astype("float32"))
    received = ops.stack(windows(inputs, kernel_size, strides, padding, dilation), axis=-2)
    np.testing.assert_array_equal(ops.convert_to_numpy(received), expected)


@pytest.mark.parametrize(
    ("name", "depthwise", "per_example"),
    [
        pytest.param("diagonal", False, False, id="diagonal-convolution-positions"),
        pytest.param("diagonal", True, True, id="diagonal-depthwise-examples"),
        pytest.param("unconstrained", False, True, id="unconstrained-convolution-examples"),
        pytest.param("symmetric", True, False, id="symmetric-depthwise-positions"),
    ],
)
def test_values(name, depthwise, per_example):
    for each in GEOMETRIES:
        size, kernel_size, *rest = each.values
        inputs, kernel, parameters = arrays(size, kernel_size, *rest, name, per_example)
        matrix = matrix_of(name, parameters)
        typed = (array.astype(DTYPE) for array in (inputs, kernel, parameters))
        received = applied(depthwise, *typed, name, *rest)
        expected = expected_of(inputs, kernel, matrix, depthwise, *rest)
        assert keras.backend.standardize_dtype(received.dtype) == DTYPE
        np.testing.assert_allclose(
            ops.convert_to_numpy(received),
            expected,
            rtol=TOLERANCE,
            atol=TOLERANCE,
            err_msg=each.id,
        )


def naive(inputs, kernel, parameters, name, depthwise, *geometry_of):
    """The formula in one einsum, the taps read by a product with zeros and ones."""
    pixels = int(np.prod(inputs.shape[1:-1]))
    one_hot = np.eye(pixels).reshape((1, *inputs.shape[1:-1], pixels))
    reads = patches_of(one_hot, kernel.shape[:-2], *geometry_of)[0]
    positions, taps = reads.shape[:-2], reads.shape[-2]
    reads = reads.reshape((-1, taps, pixels)).astype(DTYPE)
    shape = SIMILARITIES[name].parameter_shape(taps)
    matrix = ops.reshape(parameters, (inputs.shape[0], -1, *shape))
    if name == "diagonal":
        matrix = matrix[..., None] * np.eye(taps, dtype=DTYPE)
    outputs = ops.einsum(
        "tco,bptu,puq,bqc->bpco" if depthwise else "tco,bptu,puq,bqc->bpo",
        ops.reshape(kernel, (taps, *kernel.shape[-2:])),
        matrix,
        reads,
        ops.reshape(inputs, (inputs.shape[0], pixels, -1)),
    )
    return ops.reshape(outputs, (inputs.shape[0], *positions, -1))


def first_and_second_gradients(function, arguments):
    """Of a curved scalar of the output, and of a scalar of those gradients."""

    def value(at):
        outputs = function(*at)
        weights = np.cos(np.arange(np.prod(outputs.shape))).reshape(outputs.shape)
        return ops.sum(ops.sin(outputs) * weights.astype(DTYPE)), None

    def value_of_gradients(at):
        gradients, _ = gradients_of(value, at)
        return sum(ops.sum(ops.sin(3.0 * gradient)) for gradient in gradients), gradients

    arguments = [ops.convert_to_tensor(array.astype(DTYPE)) for array in arguments]
    second, first = gradients_of(value_of_gradients, arguments)
    return [ops.convert_to_numpy(gradient) for gradient in [*first, *second]]


@pytest.mark.parametrize(
    ("name", "depthwise", "where"),
    [
        ("diagonal", True, ((5,), (3,), (1,), "causal", (2,))),
        ("unconstrained", False, ((4, 3), (3, 3), (1, 1), "same", (1, 1))),
        ("diagonal", False, ((5, 4), (2, 3), (2, 1), "valid", (1, 1))),
        ("unconstrained", True, ((3, 4), (2, 2), (2, 3), "same", (1, 1))),
    ],
    ids=str,
)
def test_first_and_second_gradients(name, depthwise, where):
    arguments = [0.3 * array for array in arrays(*where, name)]
    received = first_and_second_gradients(
        lambda *at: applied(depthwise, *at, name, *where[2:]), arguments
    )
    expected = first_and_second_gradients(
        lambda *at: naive(*at, name, depthwise, *where[2:]), arguments
    )
    for ours, theirs in zip(received, expected, strict=True):
        assert np.max(np.abs(theirs)) > 1e-3
        np.testing.assert_allclose(ours, theirs, rtol=10 * TOLERANCE, atol=10 * TOLERANCE)


@in_graphs
@pytest.mark.parametrize(
    ("name", "depthwise"), [("diagonal", False), ("unconstrained", True)]
)
def test_unknown_batch_and_sizes(name, depthwise):
    import tensorflow as tf

    parameter_shape = SIMILARITIES[name].parameter_shape(6)

    @tf.function(
        input_signature=[
            tf.TensorSpec((None, None, None, 3), DTYPE),
            tf.TensorSpec((2, 3, 3, 2), DTYPE),
            tf.TensorSpec((None, None, None, *parameter_shape), DTYPE),
        ]
    )
    def unknown(*arguments):
        return applied(depthwise, *arguments, name, (2, 1), "same", (1, 1))

    for size in [(5, 4), (4, 7)]:
        where = (size, (2, 3), (2, 1), "same", (1, 1))
        inputs, kernel, parameters = arrays(*where, name)
        matrix = matrix_of(name, parameters)
        expected = expected_of(inputs, kernel, matrix, depthwise, *where[2:])
        np.testing.assert_allclose(
            unknown(inputs, kernel, parameters), expected, rtol=TOLERANCE, atol=TOLERANCE
        )


@in_graphs
@pytest.mark.parametrize("name", ["diagonal", "unconstrained"])
def test_no_gradient_of_indexing(name):
    # `StridedSliceGrad` takes more time than all the rest together.
    import tensorflow as tf

    where = ((5, 4), (3, 3), (2, 2), "same", (1, 1))

    @tf.function
    def gradients(*arguments):
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            outputs = applied(False, *arguments, name, *where[2:])
        return tape.gradient(outputs, arguments)

    arguments = [tf.convert_to_tensor(array) for array in arrays(*where, name)]
    graph = gradients.get_concrete_function(*arguments).graph
    kinds = {operation.type for operation in graph.get_operations()}
    assert "MatMul" in kinds
    assert "StridedSliceGrad" not in kinds
