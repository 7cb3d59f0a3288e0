"""Positions and taps of a convolution, against plain loops."""

import keras
import numpy as np
import numpy_reference
import pytest
from keras import ops

from nsl_keras.similarity import dynamic_convolution as geometry

CASES = [
    # size, kernel, strides, padding, dilation
    pytest.param((7, 6), (3, 3), (1, 1), "same", (1, 1), id="plain"),
    pytest.param((7, 6), (2, 3), (1, 1), "same", (1, 1), id="even_kernel_pads_after"),
    pytest.param((8, 5), (4, 4), (2, 2), "same", (1, 1), id="even_kernel_strided"),
    pytest.param((7, 6), (3, 3), (2, 2), "same", (1, 1), id="odd_and_even_size_strided"),
    pytest.param((7, 6), (2, 2), (3, 3), "same", (1, 1), id="stride_above_kernel"),
    pytest.param((7, 6), (1, 1), (2, 3), "same", (1, 1), id="one_tap_strided"),
    pytest.param((7, 6), (2, 3), (1, 1), "same", (3, 2), id="dilated_even_kernel"),
    pytest.param((2, 3), (5, 5), (1, 1), "same", (1, 1), id="kernel_above_image"),
    pytest.param((1, 1), (3, 3), (2, 2), "same", (1, 1), id="one_pixel"),
    pytest.param((7, 6), (2, 3), (2, 1), "valid", (1, 1), id="valid_leaves_a_rest"),
    pytest.param((7, 6), (3, 2), (1, 1), "valid", (2, 4), id="valid_dilated"),
    pytest.param((7, 6), (7, 6), (1, 1), "valid", (1, 1), id="kernel_is_the_image"),
    pytest.param((7, 6), (7, 6), (3, 3), "valid", (1, 1), id="one_position_strided"),
]


def windows(inputs, *geometry_of):
    inputs = ops.convert_to_tensor(inputs.astype("float32"))
    return ops.convert_to_numpy(ops.stack(geometry.windows(inputs, *geometry_of), axis=-2))


@pytest.mark.parametrize(("size", "kernel", "strides", "padding", "dilation"), CASES)
def test_windows_and_lengths(size, kernel, strides, padding, dilation):
    # Every pixel its own number: a shifted or swapped tap cannot go unseen.
    inputs = 1 + np.arange(2 * size[0] * size[1] * 3.0).reshape((2, *size, 3))
    expected = numpy_reference.patches(inputs, kernel, strides, padding, dilation)
    received = windows(inputs, kernel, strides, padding, dilation)
    np.testing.assert_array_equal(received, expected)
    for axis in range(2):
        assert expected.shape[1 + axis] == geometry.output_length(
            size[axis], kernel[axis], strides[axis], padding, dilation[axis]
        )


def test_windows_in_one_dimension():
    inputs = 1 + np.arange(10.0).reshape((1, 5, 2))
    expected = numpy_reference.patches(inputs[:, None], (1, 2), (1, 2), "same")[:, 0]
    received = windows(inputs, (2,), (2,), "same", (1,))
    np.testing.assert_array_equal(received, expected)


@pytest.mark.parametrize("size", [1, 2, 7, 8])
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), [(3, 1, 1), (4, 2, 1), (2, 3, 1), (3, 1, 2)]
)
def test_causal_windows_see_nothing_later(size, kernel, stride, dilation):
    inputs = 1 + np.arange(2.0 * size).reshape((1, size, 2))
    received = windows(inputs, (kernel,), (stride,), "causal", (dilation,))[0]
    for position, taps in enumerate(received):
        for tap, seen in enumerate(taps):
            at = position * stride - (kernel - 1 - tap) * dilation
            expected = inputs[0, at] if at >= 0 else np.zeros(2)
            np.testing.assert_array_equal(seen, expected)
    assert len(received) == geometry.output_length(size, kernel, stride, "causal", dilation)


def test_windows_in_three_dimensions():
    # A kernel of one tap along an axis takes each slice of it by itself.
    inputs = 1 + np.arange(4 * 3 * 5.0).reshape((1, 4, 3, 5, 1))
    received = windows(inputs, (1, 2, 3), (2, 1, 2), "same", (1, 1, 1))
    expected = numpy_reference.patches(inputs[0, ::2], (2, 3), (1, 2), "same")
    np.testing.assert_array_equal(received[0], expected)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="JAX knows every size when it traces"
)
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("size", [(7, 6), (6, 9), (3, 4)])
@pytest.mark.parametrize("kernel", [(2, 3), (1, 1)])
def test_windows_of_unknown_size(size, padding, kernel):
    import tensorflow as tf

    @tf.function(input_signature=[tf.TensorSpec((None, None, None, 2))])
    def unknown(inputs):
        return tf.stack(geometry.windows(inputs, kernel, (2, 1), padding, (1, 1)), axis=-2)

    inputs = 1 + np.arange(size[0] * size[1] * 2.0).reshape((1, *size, 2))
    expected = numpy_reference.patches(inputs, kernel, (2, 1), padding)
    np.testing.assert_array_equal(unknown(inputs.astype("float32")), expected)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_output_length_of_unknown_size(padding):
    assert geometry.output_length(None, 3, 2, padding, 1) is None


@pytest.mark.parametrize(
    ("data_format", "input_shape", "expected"),
    [
        ("channels_last", (None, 7, 6, 3), (None, 3, 4, 5)),
        ("channels_first", (2, 3, 7, 6), (2, 5, 3, 4)),
        ("channels_last", (2, None, 6, 3), (2, None, 4, 5)),
    ],
)
def test_output_shape(data_format, input_shape, expected):
    shape = geometry.output_shape(
        input_shape, 5, (2, 3), (2, 1), "valid", (1, 1), data_format
    )
    assert shape == expected


def test_output_shape_of_a_kernel_above_the_image():
    arguments = (5, (3, 2), (1, 1), "valid", (2, 1), "channels_last")
    assert geometry.output_shape((None, 5, 6, 3), *arguments) == (None, 1, 5, 5)
    with pytest.raises(ValueError, match=r"kernel_size=\(3, 2\).*dilation_rate=\(2, 1\)"):
        geometry.output_shape((None, 4, 6, 3), *arguments)
