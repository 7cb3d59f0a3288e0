"""Dynamic convolutions against their formula, written as one einsum over the taps."""

import keras
import numpy as np
import pytest
from keras import ops

from nsl_keras import similarities
from nsl_keras.similarity import geometry
from nsl_keras.similarity.dynamic_convolution import (
    dynamic_convolution,
    dynamic_depthwise_convolution,
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
    pytest.param((6,), (3,), (1,), "same", (1,), id="one_axis"),
    pytest.param((7, 6), (3, 3), (1, 1), "same", (1, 1), id="same"),
    pytest.param((7, 6), (2, 3), (2, 1), "valid", (1, 1), id="valid_strided"),
    pytest.param((7, 6), (4, 2), (2, 3), "same", (1, 1), id="even_kernel_strided"),
    pytest.param((7, 6), (2, 3), (1, 1), "same", (3, 2), id="dilated_even_kernel"),
    pytest.param((7, 6), (1, 1), (1, 1), "valid", (1, 1), id="one_tap"),
    pytest.param((2, 1), (3, 3), (2, 2), "same", (1, 1), id="kernel_above_image"),
    pytest.param((4, 5, 3), (2, 3, 2), (1, 2, 1), "same", (1, 1, 1), id="three_axes"),
    pytest.param((4, 5, 3), (2, 1, 3), (1, 1, 1), "valid", (2, 1, 1), id="volume_valid"),
]
GEOMETRY = ("size", "kernel_size", "strides", "padding", "dilation")


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
    taps = int(np.prod(kernel_size))
    positions = geometry.output_shape(
        inputs.shape, 1, kernel_size, strides, padding, dilation, "channels_last"
    )[1:-1]
    if per_example:
        positions = (1,) * len(positions)
    parameters = RNG.normal(size=(2, *positions, *SIMILARITIES[name].parameter_shape(taps)))
    matrix = parameters
    if name == "diagonal":
        matrix = parameters[..., None] * np.eye(taps)
    elif name == "symmetric":
        matrix = (parameters + np.swapaxes(parameters, -1, -2)) / 2
    return inputs, kernel, parameters, matrix


def applied(function, inputs, kernel, parameters, similarity, strides, padding, dilation):
    return function(
        ops.convert_to_tensor(inputs),
        ops.convert_to_tensor(kernel),
        ops.convert_to_tensor(parameters),
        similarity,
        strides=strides,
        padding=padding,
        dilation_rate=dilation,
    )


@pytest.mark.parametrize("per_example", [False, True], ids=["positions", "examples"])
@pytest.mark.parametrize("depthwise", [False, True], ids=["convolution", "depthwise"])
@pytest.mark.parametrize("name", SIMILARITIES)
@pytest.mark.parametrize(GEOMETRY, GEOMETRIES)
def test_values(
    size, kernel_size, strides, padding, dilation, name, depthwise, per_example
):
    inputs, kernel, parameters, matrix = arrays(
        size, kernel_size, strides, padding, dilation, name, per_example
    )
    received = applied(
        dynamic_depthwise_convolution if depthwise else dynamic_convolution,
        *(array.astype(DTYPE) for array in (inputs, kernel, parameters)),
        SIMILARITIES[name],
        strides,
        padding,
        dilation,
    )
    expected = expected_of(inputs, kernel, matrix, depthwise, strides, padding, dilation)
    assert keras.backend.standardize_dtype(received.dtype) == DTYPE
    np.testing.assert_allclose(
        ops.convert_to_numpy(received), expected, rtol=TOLERANCE, atol=TOLERANCE
    )
