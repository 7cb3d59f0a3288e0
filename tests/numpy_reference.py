"""Convolutions in plain NumPy loops, in float64: what the layers are compared with."""

import itertools

import numpy as np


def patches(inputs, kernel_size, strides=1, padding="valid", dilation_rate=1):
    """The input under every tap, read one number at a time.

    Channels last, any number of spatial axes; returns an array
    `(batch, *positions, taps, channels)`.
    """
    inputs = np.asarray(inputs, "float64")
    sizes = inputs.shape[1:-1]
    kernel_size, strides, dilation_rate = (
        (value,) * len(sizes) if isinstance(value, int) else tuple(value)
        for value in (kernel_size, strides, dilation_rate)
    )
    lengths, before = [], []
    for size, k, s, d in zip(sizes, kernel_size, strides, dilation_rate, strict=True):
        extent = (k - 1) * d + 1
        if padding == "valid":
            positions = len([p for p in range(0, size, s) if p + extent <= size])
            missing = 0
        else:
            positions = len(range(0, size, s))
            missing = max((positions - 1) * s + extent - size, 0)
        lengths.append(positions)
        # TensorFlow's "same": where the padding is odd, the larger half comes after.
        before.append(extent - 1 if padding == "causal" else missing // 2)
    taps = list(itertools.product(*map(range, kernel_size)))
    outputs = np.zeros((len(inputs), *lengths, len(taps), inputs.shape[-1]))
    for position in itertools.product(*map(range, lengths)):
        for tap, offset in enumerate(taps):
            places = zip(position, offset, strides, dilation_rate, before, strict=True)
            at = tuple(p * s + u * d - b for p, u, s, d, b in places)
            if all(0 <= a < size for a, size in zip(at, sizes, strict=True)):
                outputs[(slice(None), *position, tap)] = inputs[(slice(None), *at)]
    return outputs


def similarity_convolution(patches, kernel, matrix, bias=0.0, groups=1):
    """`y[p,o] = sum_c sum_t sum_u W[t,c,o] M[t,u] x[p,u,c] + b[o]`.

    `kernel` as Keras keeps it, `matrix` of shape `(taps, taps)`, or with the leading
    axes of `patches`, one matrix a position.
    """
    return _each_group("tco,...tu,...uc->...o", patches, kernel, matrix, groups) + bias


def full_similarity_convolution(patches, kernel, matrix, bias=0.0, groups=1):
    """`y[p,o] = sum_ct sum_du W[t,c,o] M[ct,du] x[p,u,d] + b[o]`, as Eq. (1) has it.

    `matrix` of shape `(channels * taps, channels * taps)`, channel by channel.
    """
    taps, channels = patches.shape[-2], patches.shape[-1] // groups
    matrix = np.reshape(matrix, (channels, taps, channels, taps))
    return _each_group("tco,ctdu,...ud->...o", patches, kernel, matrix, groups) + bias


def depthwise_similarity_convolution(patches, kernel, matrix, bias=0.0):
    """`y[p,(c,m)] = sum_t sum_u W[t,c,m] M[t,u] x[p,u,c] + b[(c,m)]`."""
    outputs = np.einsum("tcm,...tu,...uc->...cm", _flat(kernel), matrix, patches)
    return outputs.reshape(*outputs.shape[:-2], -1) + bias


def _each_group(formula, patches, kernel, matrix, groups):
    return np.concatenate(
        [
            np.einsum(formula, weights, matrix, group, optimize=True)
            for weights, group in zip(
                np.split(_flat(kernel), groups, axis=-1),
                np.split(patches, groups, axis=-1),
                strict=True,
            )
        ],
        axis=-1,
    )


def _flat(kernel):
    kernel = np.asarray(kernel, "float64")
    return kernel.reshape(-1, *kernel.shape[-2:])
