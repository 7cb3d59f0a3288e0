"""Sizes and paddings of convolutions, and the taps that a kernel sees.

One rule: position `p` and tap `u` of a strided, dilated convolution read the input at
`p * stride + u * dilation - padding`, the padding as TensorFlow's "same" splits it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor


def standardize_padding(padding: Any, rank: int) -> str:
    """Returns `padding` in lower case.

    Raises:
        ValueError: If it is not `"valid"`, `"same"` or, along one axis, `"causal"`.
    """
    allowed = ("valid", "same", "causal") if rank == 1 else ("valid", "same")
    lower = padding.lower() if isinstance(padding, str) else padding
    return validation.one_of(lower, allowed, "padding")


def output_length(
    length: int | None, kernel: int, stride: int, padding: str, dilation: int
) -> int | None:
    """Returns the number of output positions along one spatial axis."""
    if length is None:
        return None
    if padding in ("same", "causal"):
        return -(-length // stride)
    return (length - (kernel - 1) * dilation - 1) // stride + 1


def output_shape(
    input_shape: Sequence[int | None],
    filters: int | None,
    kernel_size: Sequence[int],
    strides: Sequence[int],
    padding: str,
    dilation_rate: Sequence[int],
    data_format: str,
) -> tuple[int | None, ...]:
    """Returns the shape of a convolution's output, batch axis included.

    Raises:
        ValueError: If the kernel is larger than the input.
    """
    spatial = input_shape[1:-1] if data_format == "channels_last" else input_shape[2:]
    lengths = tuple(
        output_length(length, kernel, stride, padding, dilation)
        for length, kernel, stride, dilation in zip(
            spatial, kernel_size, strides, dilation_rate, strict=True
        )
    )
    if any(length is not None and length < 1 for length in lengths):
        raise ValueError(
            "`kernel_size` (times `dilation_rate`) must not exceed the spatial size "
            f"of the input. Received: kernel_size={tuple(kernel_size)}, "
            f"dilation_rate={tuple(dilation_rate)}, input_shape={tuple(input_shape)}"
        )
    if data_format == "channels_last":
        return (input_shape[0], *lengths, filters)
    return (input_shape[0], filters, *lengths)


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
        reach = (k - 1) * d
        length: Any = output_length(size, k, s, padding, d)
        needed = (length - 1) * s + reach + 1 - size
        before = {"valid": 0, "causal": reach, "same": _at_least_zero(needed) // 2}[padding]
        extent = s * (length + reach // s)
        lengths.append(length)
        extents.append(extent)
        paddings.append([before, _at_least_zero(extent - before - size)])
    # Every s-th pixel: one of the s phases of an axis, each at the step of the positions.
    phases: dict[tuple[int, ...], Tensor]
    phases = {(): ops.pad(inputs, [[0, 0], *paddings, [0, 0]])}
    for axis, (stride, extent) in enumerate(zip(strides, extents, strict=True), start=1):
        phases = {
            (*place, number): phase
            for place, tensor in phases.items()
            for number, phase in enumerate(_phases(tensor, axis, stride, extent))
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
    if stride == 1:
        return [tensor]
    shape = list(ops.shape(tensor))
    shape[axis] = extent
    cropped = ops.slice(tensor, (0,) * len(shape), shape)
    shape[axis : axis + 1] = [extent // stride, stride]
    return ops.unstack(ops.reshape(cropped, shape), stride, axis + 1)


def _at_least_zero(value: Any) -> Any:
    return max(value, 0) if isinstance(value, int) else ops.maximum(value, 0)
