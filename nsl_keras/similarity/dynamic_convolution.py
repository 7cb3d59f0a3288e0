"""Convolutions as functions: with one kernel, and with a similarity at every position.

One rule for both: position `p` and tap `u` of a strided, dilated convolution read the input
at `p * stride + u * dilation - padding`, the padding as TensorFlow's "same" splits it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from nsl_keras.backend import Tensor

#: The error for inputs smaller than the kernel, as Keras says it.
TOO_SMALL = (
    "Computed output size would be zero or negative: the kernel must fit into the input. "
    "Received: kernel_size={}, input_shape={}"
)


def convolve(layer: Any, inputs: Tensor, kernel: Tensor) -> Tensor:
    """Returns the plain convolution of a Keras layer's geometry with another kernel."""
    padding = layer.padding
    if padding == "causal":
        padding = "valid"
        widths = [[0, 0], [0, 0], [0, 0]]
        before = (layer.kernel_size[0] - 1) * layer.dilation_rate[0]
        widths[1 if layer.data_format == "channels_last" else 2] = [before, 0]
        inputs = ops.pad(inputs, widths)
    return ops.conv(
        inputs,
        ops.cast(kernel, inputs.dtype),
        strides=layer.strides,
        padding=padding,
        data_format=layer.data_format,
        dilation_rate=layer.dilation_rate,
    )


def convolve_depthwise(layer: Any, inputs: Tensor, kernel: Tensor) -> Tensor:
    """As `convolve`, for a depthwise layer."""
    return ops.depthwise_conv(
        inputs,
        ops.cast(kernel, inputs.dtype),
        strides=layer.strides,
        padding=layer.padding,
        data_format=layer.data_format,
        dilation_rate=layer.dilation_rate,
    )


def add_bias_and_activate(layer: Any, outputs: Tensor) -> Tensor:
    """Returns `activation(outputs + bias)`, as a Keras convolution ends."""
    if layer.bias is not None:
        shape = [1] * len(outputs.shape)
        shape[1 if layer.data_format == "channels_first" else -1] = -1
        # Not `ops.add`, as in Keras's layers: with channels first on TensorFlow it adds the
        # bias along the width where that equals the number of filters (Keras 3.15).
        outputs = outputs + ops.reshape(ops.cast(layer.bias, outputs.dtype), shape)
    return outputs if layer.activation is None else layer.activation(outputs)


def dynamic_convolution(
    inputs: Tensor,
    kernel: Tensor,
    compare_windows: Callable[[list[Tensor]], list[Tensor]],
    *,
    strides: Sequence[int],
    padding: str,
    dilation_rate: Sequence[int],
) -> Tensor:
    """Returns `y[p,o] = sum_c sum_t sum_u W[t,c,o] M(p)[t,u] x[p,u,c]`.

    Args:
        inputs: Tensor of shape `(batch, *spatial, channels)`.
        kernel: Tensor of shape `(*kernel_size, channels, filters)`.
        compare_windows: Callable that returns `M(p) x_p` from a list of the input under
            each tap, as `Similarity.compare_windows` does.
        strides: Strides along each spatial axis.
        padding: `"valid"`, `"same"`, or `"causal"` along one axis.
        dilation_rate: Dilation along each spatial axis.

    Returns:
        Tensor of shape `(batch, *positions, filters)`, of the inputs' dtype.
    """
    *kernel_size, _, filters = kernel.shape
    patches = windows(inputs, kernel_size, strides, padding, dilation_rate)
    compared = compare_windows(patches)  # NSL Eq. (3): M(p) x_p, and below W^T of it.
    weights = ops.cast(ops.reshape(kernel, (-1, filters)), inputs.dtype)
    outputs = [
        ops.matmul(ops.reshape(part, (-1, part.shape[-1])), weight)
        for part, weight in zip(compared, ops.split(weights, len(compared)), strict=True)
    ]
    return ops.reshape(sum(outputs), (*ops.shape(patches[0])[:-1], filters))


def dynamic_depthwise_convolution(
    inputs: Tensor,
    kernel: Tensor,
    compare_windows: Callable[[list[Tensor]], list[Tensor]],
    *,
    strides: Sequence[int],
    padding: str,
    dilation_rate: Sequence[int],
) -> Tensor:
    """Returns `y[p,(c,m)] = sum_t sum_u W[t,c,m] M(p)[t,u] x[p,u,c]`.

    The arguments are those of `dynamic_convolution`, with a kernel of shape
    `(*kernel_size, channels, multiplier)`. The output has the shape
    `(batch, *positions, channels * multiplier)`, the channels in the order of
    `keras.layers.DepthwiseConv2D`: `c * multiplier + m`.
    """
    *kernel_size, channels, multiplier = kernel.shape
    patches = windows(inputs, kernel_size, strides, padding, dilation_rate)
    compared = compare_windows(patches)  # NSL Eq. (3), the channels apart.
    rows = [
        row
        for part in compared
        for row in ops.split(part, part.shape[-1] // channels, axis=-1)
    ]
    weights = ops.cast(ops.reshape(kernel, (-1, channels, multiplier)), inputs.dtype)
    outputs = [
        sum(row * weights[tap, :, number] for tap, row in enumerate(rows))
        for number in range(multiplier)
    ]
    shape = (*ops.shape(patches[0])[:-1], channels * multiplier)
    return ops.reshape(ops.stack(outputs, axis=-1), shape)


def windows(
    inputs: Tensor,
    kernel_size: Sequence[int],
    strides: Sequence[int],
    padding: str,
    dilation_rate: Sequence[int],
) -> list[Tensor]:
    """Returns the input under every tap, as shifted copies.

    Args:
        inputs: Tensor of shape `(batch, *spatial, channels)`.
        kernel_size: Taps along each spatial axis.
        strides: Strides along each spatial axis.
        padding: `"valid"`, `"same"` or `"causal"` (zeros before, none after).
        dilation_rate: Dilation along each spatial axis.

    Returns:
        A tensor of shape `(batch, *positions, channels)` for every tap, row-major.
    """
    # A static size where there is one; a scalar tensor of a graph where there is not.
    batch, *sizes, channels = ops.shape(inputs)
    lengths, extents, paddings = [], [], []
    for size, k, s, d in zip(sizes, kernel_size, strides, dilation_rate, strict=True):
        maximum: Any = max if isinstance(size, int) else ops.maximum
        reach = (k - 1) * d
        # The number of output positions.
        length = (size - reach - 1) // s + 1 if padding == "valid" else -(-size // s)
        needed = maximum((length - 1) * s + reach + 1 - size, 0)
        before = {"valid": 0, "causal": reach, "same": needed // 2}[padding]
        extent = s * (length + reach // s)
        lengths.append(length)
        extents.append(extent)
        paddings.append([before, maximum(extent - before - size, 0)])
    # Every s-th pixel: one of the s phases of an axis, each at the step of the positions.
    phases: dict[tuple[int, ...], Tensor]
    phases = {(): ops.pad(inputs, [[0, 0], *paddings, [0, 0]])}
    for axis, (stride, extent) in enumerate(zip(strides, extents, strict=True), start=1):
        phases = {
            (*place, number): phase
            for place, tensor in phases.items()
            for number, phase in enumerate(
                [tensor] if stride == 1 else _phases(tensor, axis, stride, extent)
            )
        }
    shifted = []
    for tap in itertools.product(*(range(k) for k in kernel_size)):
        offsets = [t * d for t, d in zip(tap, dilation_rate, strict=True)]
        place = tuple(o % s for o, s in zip(offsets, strides, strict=True))
        start = [o // s for o, s in zip(offsets, strides, strict=True)]
        # Not by indexing: without XLA, TensorFlow's gradient of it is several times
        # slower on a CPU than that of a slice, which is a padding.
        shifted.append(
            ops.slice(phases[place], (0, *start, 0), (batch, *lengths, channels))
        )
    return shifted


def _phases(tensor: Tensor, axis: int, stride: int, extent: Any) -> list[Tensor]:
    """Returns the first `extent` pixels along an axis, dealt out to `stride` tensors."""
    shape = list(ops.shape(tensor))
    shape[axis] = extent
    cropped = ops.slice(tensor, (0,) * len(shape), shape)
    shape[axis : axis + 1] = [extent // stride, stride]
    return ops.unstack(ops.reshape(cropped, shape), stride, axis + 1)
