"""What each dictionary entry adds to a finetuned head's outputs.

With the query held, the outputs are a function `F(a)` of the weights `a` that the inner
loss gives to the entries: `F(0)` is the head as it is, `F(w)` the finetuned one. Along
the straight path from 0 to `w`, the change is an integral over all entries' shares,

    F(w) - F(0) = sum_j w_j * integral_0^1 dF/da_j (t w) dt

and entry `j`'s share is its term. Shares of all entries sum to the whole change, whatever
the head and the number of steps (the Aumann-Shapley value of the entry, or "integrated
gradients"). Where outputs are linear in the head's weights, one inner step on a dense
layer, the share is `-rate * w_j (k_j . z + 1) dL_j/df`: what the entry does on its own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from keras import ops

from nsl_keras.backend import Tensor, gradients_of_columns

#: Gauss-Legendre nodes of the integral: exact for polynomials in `t` up to degree 15.
PATH_POINTS = 8


def contributions(
    adapted_outputs: Callable[[Tensor, Tensor], Tensor],
    attention: Tensor,
    queries: Tensor,
    indices: Tensor,
) -> Tensor:
    """Returns the shares of chosen entries in the change of the outputs.

    All points of the path are computed in one batch: once through the head, and as many
    times back as it has outputs.

    Args:
        adapted_outputs: Callable from weights of the entries, of shape `(rows, entries)`,
            and queries, of shape `(rows, features)`, to outputs of shape `(rows,
            outputs)`, each row for itself.
        attention: The weights at the end of the path, of shape `(batch, entries)`.
        queries: The examples' features, of shape `(batch, features)`.
        indices: Entry numbers, of shape `(batch, k)`.

    Returns:
        Tensor of shape `(batch, k, outputs)`.
    """
    nodes, node_weights = (
        ops.convert_to_tensor(values / 2, dtype=attention.dtype)
        for values in np.polynomial.legendre.leggauss(PATH_POINTS)
    )
    entries, features = attention.shape[1], queries.shape[1]
    along_path = (nodes[:, None, None] + 0.5) * attention
    repeated = ops.broadcast_to(queries, (PATH_POINTS, *ops.shape(queries)))
    repeated = ops.reshape(repeated, (-1, features))
    slopes = gradients_of_columns(
        lambda weights: adapted_outputs(weights, repeated),
        ops.reshape(along_path, (-1, entries)),
    )
    averages = [
        ops.tensordot(node_weights, ops.reshape(slope, (PATH_POINTS, -1, entries)), 1)
        for slope in slopes
    ]
    shares = [
        ops.take_along_axis(attention * average, indices, axis=-1) for average in averages
    ]
    return ops.stack(shares, axis=-1)
