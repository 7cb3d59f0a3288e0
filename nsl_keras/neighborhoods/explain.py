"""The effect of each dictionary entry on a finetuned head's outputs.

For a fixed query, the outputs are a function `F(a)` of the weights `a` that the inner loss
gives to the entries: `F(0)` are the outputs before adaptation, `F(w)` those after. Along
the straight path from 0 to `w`, the change is an integral over all entries' shares,

    F(w) - F(0) = sum_j w_j * integral_0^1 dF/da_j (t w) dt

and entry `j`'s share is its term. The shares of all entries sum to the whole change, for
any head and number of steps (the Aumann-Shapley value of the entry, or "integrated
gradients"). For one inner step on a dense layer, whose outputs are linear in its weights,
the share is `-rate * w_j (k_j . z + 1) dL_j/df`: the effect of the entry alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from nsl_keras.backend import Tensor, gradients_of_columns

#: Gauss-Legendre nodes of the integral: exact for polynomials in `t` up to degree 63.
PATH_POINTS = 32
#: How many of them are computed at once: memory grows with these.
_POINTS_AT_ONCE = 8


class Nearest(NamedTuple):
    """The dictionary entries of largest attention for an example, the heaviest first.

    Attributes:
        indices: Entry numbers, of shape `(batch, k)`.
        weights: Attention weights, of that shape.
        values: Class probabilities (in regression targets) of the entries, of shape
            `(batch, k, outputs)`.
    """

    indices: Any
    weights: Any
    values: Any


class Neighbors(NamedTuple):
    """The fields of `Nearest`, and the effects of the entries.

    Attributes:
        output_changes: The contribution of each entry to the example's logits (in
            regression outputs), of shape `(batch, k, outputs)`. Over all entries they sum
            to the outputs after adaptation minus those before. They are an integral over
            the path from no attention to the actual one, computed from 32 points.
            For one step it is exact on a `Dense` layer, and exact to rounding on a
            `CosineDense` layer. The error grows with rate and steps, most through ReLU
            layers: compare the sum with the change of the outputs.
    """

    indices: Any
    weights: Any
    values: Any
    output_changes: Any


def output_changes(
    adapted_outputs: Callable[[Tensor, Tensor], Tensor],
    attention: Tensor,
    queries: Tensor,
    indices: Tensor,
) -> Tensor:
    """Returns the shares of chosen entries in the change of the outputs.

    `adapted_outputs(weights, queries)` returns outputs from weights of shape
    `(rows, entries)` and queries of shape `(rows, features)`, row by row. The path ends at
    `attention`; `indices` of shape `(batch, k)` are the chosen entries.
    """
    nodes, node_weights = (
        ops.convert_to_tensor(values / 2, dtype=attention.dtype)
        for values in np.polynomial.legendre.leggauss(PATH_POINTS)
    )
    entries, features = attention.shape[1], queries.shape[1]
    repeated = ops.broadcast_to(queries, (_POINTS_AT_ONCE, *ops.shape(queries)))
    repeated = ops.reshape(repeated, (-1, features))
    parts = []
    for start in range(0, PATH_POINTS, _POINTS_AT_ONCE):
        some = slice(start, start + _POINTS_AT_ONCE)
        along_path = (nodes[some, None, None] + 0.5) * attention
        slopes = gradients_of_columns(
            lambda weights: adapted_outputs(weights, repeated),
            ops.reshape(along_path, (-1, entries)),
        )
        by_point = (_POINTS_AT_ONCE, -1, entries)
        parts.append(
            [ops.tensordot(node_weights[some], ops.reshape(s, by_point), 1) for s in slopes]
        )
    averages = [sum(columns) for columns in zip(*parts, strict=True)]
    shares = [
        ops.take_along_axis(attention * average, indices, axis=-1) for average in averages
    ]
    return ops.stack(shares, axis=-1)
