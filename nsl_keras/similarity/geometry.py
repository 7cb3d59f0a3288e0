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

Tensor = Any


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


def patches(
    inputs: Tensor,
    kernel_size: Sequence[int],
    strides: Sequence[int],
    padding: str,
    dilation_rate: Sequence[int],
) -> Tensor:
    """Returns the input under every tap, as shifted copies.

    Args:
        inputs: Tensor of shape `(batch, *spatial, channels)`.
        kernel_size: Taps along each spatial axis; taps are numbered row-major.
        strides: Strides along each spatial axis.
        padding: `"valid"`, `"same"` or `"causal"` (zeros before, none after).
        dilation_rate: Dilation along each spatial axis.

    Returns:
        Tensor of shape `(batch, *output_spatial, taps, channels)`.
    """
    # A static size where there is one; a scalar tensor of a graph where there is not.
    sizes = ops.shape(inputs)[1:-1]
    reach = [(k - 1) * d for k, d in zip(kernel_size, dilation_rate, strict=True)]
    if padding == "same":
        lengths = [-(-size // s) for size, s in zip(sizes, strides, strict=True)]
        totals = [
            _at_least_zero((length - 1) * s + r + 1 - size)
            for length, s, r, size in zip(lengths, strides, reach, sizes, strict=True)
        ]
        before_after = [[total // 2, total - total // 2] for total in totals]
        inputs = ops.pad(inputs, [[0, 0], *before_after, [0, 0]])
    elif padding == "causal":
        lengths = [-(-size // s) for size, s in zip(sizes, strides, strict=True)]
        inputs = ops.pad(inputs, [[0, 0], *([r, 0] for r in reach), [0, 0]])
    else:
        lengths = [
            (size - r - 1) // s + 1
            for size, s, r in zip(sizes, strides, reach, strict=True)
        ]
    shifted = []
    for tap in itertools.product(*(range(k) for k in kernel_size)):
        window = tuple(
            slice(t * d, t * d + (length - 1) * s + 1, s)
            for t, d, length, s in zip(tap, dilation_rate, lengths, strides, strict=True)
        )
        shifted.append(inputs[(slice(None), *window, slice(None))])
    return ops.stack(shifted, axis=-2)


def _at_least_zero(value: Any) -> Any:
    return max(value, 0) if isinstance(value, int) else ops.maximum(value, 0)
