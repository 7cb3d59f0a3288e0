"""Norms, and responses to the angle between kernel and input: the parts of SphereConv.

The 1e-4 stands under each root, so that an all-zero input has the value zero and finite
derivatives of every order. Norms and angles are taken in float32.
"""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32

#: Added under each root, as the authors' code has it.
NORM_EPSILON = 1e-4

NORMALIZE = ("both", "input", "kernel")
RESPONSES = ("cosine", "linear", "sigmoid", "learnable_sigmoid")

#: The authors' rounded 2 / pi.
LINEAR_SLOPE = 0.63662
SIGMOID_CURVATURE = 0.3
INITIAL_CURVATURE = 0.7
SMALLEST_CURVATURE = 0.05

#: Angles are taken of cosines this far from 1: the arc cosine has no derivative there.
COSINE_MARGIN = 1e-6


def check(normalize: Any, response: Any) -> tuple[str, str]:
    """Returns the two arguments if they are known and go together."""
    validation.one_of(normalize, NORMALIZE, "normalize")
    validation.one_of(response, RESPONSES, "response")
    if response != "cosine" and normalize != "both":
        raise ValueError(
            "`normalize` must be 'both' where `response` is not 'cosine': an angle needs "
            f"both norms. Received: normalize={normalize!r}, response={response!r}"
        )
    return normalize, response


def norm(tensor: Tensor, axis: int | tuple[int, ...], keepdims: bool = False) -> Tensor:
    """Returns `sqrt(sum(a^2) + 1e-4)` along `axis`, in float32."""
    squares = ops.square(at_least_float32(tensor))
    return root(ops.sum(squares, axis=axis, keepdims=keepdims))


def root(sum_of_squares: Tensor) -> Tensor:
    """Returns the norm that belongs to a sum of squares."""
    return ops.sqrt(sum_of_squares + NORM_EPSILON)


def add_curvature(layer: keras.layers.Layer, filters: int, response: str) -> Any:
    """Returns the weight of a layer's `"learnable_sigmoid"`, `None` for other responses."""
    if response != "learnable_sigmoid":
        return None
    return layer.add_weight(
        name="curvature",
        shape=(filters,),
        initializer=keras.initializers.Constant(INITIAL_CURVATURE),
        autocast=False,
    )


def respond(cosine: Tensor, response: str, curvature: Tensor | None) -> Tensor:
    """Returns `g(cos)`.

    Args:
        cosine: Tensor of cosines, in float32.
        response: One of `RESPONSES`.
        curvature: The weight of `"learnable_sigmoid"`, in a shape that broadcasts with
            `cosine`; `None` for the others.
    """
    if response == "cosine":
        return cosine
    cosine = ops.clip(cosine, COSINE_MARGIN - 1, 1 - COSINE_MARGIN)
    if response == "linear":
        return 1 - LINEAR_SLOPE * ops.arccos(cosine)
    # The authors' fractions of exponentials, as hyperbolic tangents: these cannot
    # overflow, however small `k` is.
    if curvature is None:
        return ops.tanh(ops.arcsin(cosine) / (2 * SIGMOID_CURVATURE)) / math.tanh(
            math.pi / (4 * SIGMOID_CURVATURE)
        )
    k = ops.abs(curvature) + SMALLEST_CURVATURE
    return ops.tanh(ops.arcsin(cosine) / (2 * k)) / ops.tanh(math.pi / (4 * k))
