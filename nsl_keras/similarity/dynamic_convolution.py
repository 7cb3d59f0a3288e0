"""Convolutions whose similarity differs from position to position: `W^T M(p) x_p`.

Pure functions, channels last. The similarity says how `M(p)` compares a kernel with the
input under it; the padding, striding and weighing are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from nsl_keras.similarity import geometry
from nsl_keras.similarity.matrices import Similarity

Tensor = Any


def dynamic_convolution(
    inputs: Tensor,
    kernel: Tensor,
    parameters: Tensor,
    similarity: Similarity,
    *,
    strides: Sequence[int],
    padding: str,
    dilation_rate: Sequence[int],
) -> Tensor:
    """Returns `y[p,o] = sum_c sum_t sum_u W[t,c,o] M(p)[t,u] x[p,u,c]`.

    Args:
        inputs: Tensor of shape `(batch, *spatial, channels)`.
        kernel: Tensor of shape `(*kernel_size, channels, filters)`.
        parameters: Parameters of `M`, of shape `(batch, *positions, *parameter_shape)`;
            the axes of the positions may all be 1, for one `M` per example.
        similarity: The `Similarity` that the parameters belong to.
        strides: Strides along each spatial axis.
        padding: `"valid"`, `"same"`, or `"causal"` along one axis.
        dilation_rate: Dilation along each spatial axis.

    Returns:
        Tensor of shape `(batch, *positions, filters)`, of the inputs' dtype.
    """
    *kernel_size, channels, filters = kernel.shape
    compared = _compared(
        inputs, kernel_size, parameters, similarity, strides, padding, dilation_rate
    )
    *positions, taps, _ = ops.shape(compared)
    # A 1x1 convolution: the same product as a matmul, and several times faster than it
    # on a CPU without XLA.
    return ops.conv(
        ops.reshape(compared, (*positions, taps * channels)),
        ops.cast(
            ops.reshape(kernel, (*[1] * len(kernel_size), taps * channels, filters)),
            compared.dtype,
        ),
        data_format="channels_last",
    )


def dynamic_depthwise_convolution(
    inputs: Tensor,
    kernel: Tensor,
    parameters: Tensor,
    similarity: Similarity,
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
    compared = _compared(
        inputs, kernel_size, parameters, similarity, strides, padding, dilation_rate
    )
    *positions, taps, _ = ops.shape(compared)
    weights = ops.cast(ops.reshape(kernel, (taps, channels, multiplier)), compared.dtype)
    outputs = ops.sum(compared[..., None] * weights, axis=-3)
    return ops.reshape(outputs, (*positions, channels * multiplier))


def _compared(
    inputs: Tensor,
    kernel_size: Sequence[int],
    parameters: Tensor,
    similarity: Similarity,
    strides: Sequence[int],
    padding: str,
    dilation_rate: Sequence[int],
) -> Tensor:
    """Returns `M(p) x_p`, of shape `(batch, *positions, taps, channels)`."""
    patches = geometry.patches(inputs, kernel_size, strides, padding, dilation_rate)
    return similarity.compare(ops.cast(parameters, inputs.dtype), patches)
