"""A sparse similarity with one entry, as what it is: a spatial shift and one tap.

With `M[t, u]` the one entry, output position `p` reads the input at
`p * stride + u * dilation - padding` alone, and multiplies with `W[t] M[t, u]`.
"""

from __future__ import annotations

from collections.abc import Collection

import keras
import numpy as np
from keras import ops

from nsl_keras.similarity import matrices
from nsl_keras.similarity.geometry import output_length
from nsl_keras.similarity.similarity_window import SimilarityWindow

_ZERO_PADDING = {
    1: keras.layers.ZeroPadding1D,
    2: keras.layers.ZeroPadding2D,
    3: keras.layers.ZeroPadding3D,
}
_CROPPING = {
    1: keras.layers.Cropping1D,
    2: keras.layers.Cropping2D,
    3: keras.layers.Cropping3D,
}


def shifted(
    layer: SimilarityWindow, input_shapes: Collection[tuple[int | None, ...]]
) -> list[keras.layers.Layer] | None:
    """Returns zero padding, cropping and a convolution with one tap, each where needed.

    Args:
        layer: A static layer, built.
        input_shapes: The shapes of the inputs that it is called on.

    Returns:
        The layers to call one after the other; `None` if the similarity has more than one
        entry, or if the shift would depend on sizes that are not known, or that differ.
    """
    if not isinstance(layer.similarity, matrices.Sparse) or layer.similarity.nonzeros != 1:
        return None
    matrix = np.abs(ops.convert_to_numpy(layer.similarity_matrix))
    _, read = np.unravel_index(np.argmax(matrix), matrix.shape)
    tap = tuple(int(each) for each in np.unravel_index(read, layer.kernel_size))
    first = 1 if layer.data_format == "channels_last" else 2
    shifts = {
        tuple(
            _shift(layer, axis, tap[axis], shape[first + axis])
            for axis in range(layer.rank)
        )
        for shape in input_shapes
    }
    if len(shifts) != 1:
        return None
    known = [each for each in shifts.pop() if each is not None]
    if len(known) < layer.rank:
        return None
    # The padding first: then there is always enough to crop.
    padding = tuple((max(before, 0), max(after, 0)) for before, after in known)
    cropping = tuple((max(-before, 0), max(-after, 0)) for before, after in known)
    options = {"dtype": layer.dtype_policy}
    if layer.rank > 1:
        options["data_format"] = layer.data_format
    elif layer.data_format == "channels_first":
        if np.any(cropping):
            return None  # `Cropping1D` is for channels-last sequences alone.
        options["data_format"] = layer.data_format
    chain = []
    for name, kinds, widths in (
        ("padding", _ZERO_PADDING, padding),
        ("cropping", _CROPPING, cropping),
    ):
        if np.any(widths):
            given = widths[0] if layer.rank == 1 else widths
            chain.append(kinds[layer.rank](given, name=f"{layer.name}_{name}", **options))
    return [*chain, _with_one_tap(layer, tap)]


def _shift(
    layer: SimilarityWindow, axis: int, tap: int, size: int | None
) -> tuple[int, int] | None:
    """Returns the zeros to put before and after an axis; to crop, where negative."""
    kernel, stride = layer.kernel_size[axis], layer.strides[axis]
    dilation = layer.dilation_rate[axis]
    reach = (kernel - 1) * dilation
    if layer.padding == "valid":
        return -tap * dilation, tap * dilation - reach
    if layer.padding == "causal":
        return reach - tap * dilation, tap * dilation - reach
    if stride == 1:
        return reach // 2 - tap * dilation, tap * dilation - reach // 2
    length = output_length(size, kernel, stride, layer.padding, dilation)
    if size is None or length is None:
        return None
    start = tap * dilation - max((length - 1) * stride + reach + 1 - size, 0) // 2
    # Any size between these gives as many outputs: the one that changes least.
    new_size = min(max(size - start, (length - 1) * stride + 1), length * stride)
    return -start, start + new_size - size


def _with_one_tap(layer: SimilarityWindow, tap: tuple[int, ...]) -> keras.layers.Layer:
    """Returns the plain layer with the equivalent kernel's one tap that is not zero."""
    folded = layer.fold()
    ones = (1,) * layer.rank
    plain = type(folded).from_config(
        {
            **folded.get_config(),
            "kernel_size": ones,
            "padding": "valid",
            "dilation_rate": ones,
        }
    )
    shape: list[int | None] = [None] * (layer.rank + 2)
    shape[layer.channel_axis] = layer.input_spec.axes[layer.channel_axis]
    plain.build(tuple(shape))
    kernel = ops.convert_to_numpy(folded.kernel)[tap]
    plain.kernel.assign(kernel.reshape(plain.kernel.shape))
    if layer.use_bias:
        plain.bias.assign(ops.convert_to_numpy(layer.bias))
    return plain
