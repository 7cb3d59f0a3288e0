"""Convolutions in plain NumPy loops, in float64: what the layers are compared with."""

import itertools

import numpy as np


def pair(value):
    return (value, value) if isinstance(value, int) else tuple(value)


def patches(inputs, kernel_size, strides=1, padding="valid", dilation_rate=1):
    """The input under every tap, read one number at a time.

    Channels last; returns an array `(batch, rows, columns, taps, channels)`.
    """
    inputs = np.asarray(inputs, "float64")
    lengths, before = [], []
    kernel_size, strides = pair(kernel_size), pair(strides)
    dilation_rate = pair(dilation_rate)
    for size, k, s, d in zip(
        inputs.shape[1:3], kernel_size, strides, dilation_rate, strict=True
    ):
        extent = (k - 1) * d + 1
        if padding == "valid":
            positions = len([p for p in range(0, size, s) if p + extent <= size])
            missing = 0
        else:
            positions = len(range(0, size, s))
            missing = max((positions - 1) * s + extent - size, 0)
        lengths.append(positions)
        # TensorFlow's "same": where the padding is odd, the larger half comes after.
        before.append(missing // 2)
    taps = list(itertools.product(range(kernel_size[0]), range(kernel_size[1])))
    outputs = np.zeros((len(inputs), *lengths, len(taps), inputs.shape[-1]))
    for row, column in itertools.product(*map(range, lengths)):
        for tap, offset in enumerate(taps):
            at = [
                p * s + u * d - b
                for p, u, s, d, b in zip(
                    (row, column), offset, strides, dilation_rate, before, strict=True
                )
            ]
            if 0 <= at[0] < inputs.shape[1] and 0 <= at[1] < inputs.shape[2]:
                outputs[:, row, column, tap] = inputs[:, at[0], at[1]]
    return outputs


def similarity_convolution(patches, kernel, matrix, bias=0.0, groups=1):
    """`y[p,o] = sum_c sum_t sum_u W[t,c,o] M[t,u] x[p,u,c] + b[o]`.

    `kernel` as Keras keeps it, `matrix` of shape `(taps, taps)`, or with the leading
    axes of `patches`, one matrix a position.
    """
    kernel = np.asarray(kernel, "float64")
    kernel = kernel.reshape(-1, *kernel.shape[-2:])
    outputs = [
        np.einsum("tco,...tu,...uc->...o", weights, np.asarray(matrix, "float64"), group)
        for weights, group in zip(
            np.split(kernel, groups, axis=-1),
            np.split(patches, groups, axis=-1),
            strict=True,
        )
    ]
    return np.concatenate(outputs, axis=-1) + np.asarray(bias, "float64")
