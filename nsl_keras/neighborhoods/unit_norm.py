"""Unit vectors with a defined value and gradient at zero.

`a / sqrt(max(sum(a^2), 1e-12))`: exact for every vector longer than 1e-6; zero maps to
zero, with a finite gradient.
"""

from __future__ import annotations

from keras import ops

from nsl_keras.backend import Tensor

NORM_EPSILON = 1e-12


def unit_norm(tensor: Tensor, axis: int = -1) -> Tensor:
    """Returns `tensor` divided by its length along `axis`."""
    return tensor * inverse_norm(tensor, axis)


def inverse_norm(tensor: Tensor, axis: int = -1) -> Tensor:
    """Returns `1 / sqrt(max(sum(a^2), 1e-12))` along `axis`, which is kept."""
    squares = ops.sum(ops.square(tensor), axis=axis, keepdims=True)
    return ops.rsqrt(ops.maximum(squares, NORM_EPSILON))
