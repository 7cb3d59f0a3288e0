"""The patches of a convolution in plain NumPy loops, in float64."""

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
