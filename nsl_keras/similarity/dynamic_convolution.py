"""Convolutions whose similarity differs from position to position: `W^T M(p) x_p`.

Pure functions, channels last. The similarity says how `M(p)` compares a kernel with the
input under it; the padding, striding and weighing are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from keras import ops

from nsl_keras.backend import Tensor
from nsl_keras.similarity import geometry
from nsl_keras.similarity.matrices import Diagonal, Similarity


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
    *kernel_size, _, filters = kernel.shape
    windows = geometry.windows(inputs, kernel_size, strides, padding, dilation_rate)
    compared = _compared(windows, parameters, similarity)
    weights = ops.cast(ops.reshape(kernel, (-1, filters)), inputs.dtype)
    outputs = [
        ops.matmul(ops.reshape(part, (-1, part.shape[-1])), weight)
        for part, weight in zip(compared, ops.split(weights, len(compared)), strict=True)
    ]
    return ops.reshape(sum(outputs), (*ops.shape(windows[0])[:-1], filters))


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
    windows = geometry.windows(inputs, kernel_size, strides, padding, dilation_rate)
    compared = [
        row
        for part in _compared(windows, parameters, similarity)
        for row in ops.split(part, part.shape[-1] // channels, axis=-1)
    ]
    weights = ops.cast(ops.reshape(kernel, (-1, channels, multiplier)), inputs.dtype)
    outputs = [
        sum(row * weights[tap, :, number] for tap, row in enumerate(compared))
        for number in range(multiplier)
    ]
    shape = (*ops.shape(windows[0])[:-1], channels * multiplier)
    return ops.reshape(ops.stack(outputs, axis=-1), shape)


def _compared(
    windows: list[Tensor], parameters: Tensor, similarity: Similarity
) -> list[Tensor]:
    """Returns `M(p) x_p`, of shape `(batch, *positions, taps * channels)`, in parts.

    The parts follow one another along the last axis.
    """
    parameters = ops.cast(parameters, windows[0].dtype)
    if type(similarity).compare is Diagonal.compare:
        # Each tap's mask on its own: nothing has to be gathered in one large tensor.
        masks = ops.split(parameters, len(windows), axis=-1)
        return [mask * window for mask, window in zip(masks, windows, strict=True)]
    compared = similarity.compare(parameters, ops.stack(windows, axis=-2))
    *positions, taps, channels = ops.shape(compared)
    return [ops.reshape(compared, (*positions, taps * channels))]
