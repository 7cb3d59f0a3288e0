"""The effect of each dictionary entry on a finetuned head's outputs.

For a fixed query, the outputs are a function `F(a)` of the weights `a` that the inner loss
gives to the entries: `F(0)` are the outputs before adaptation, `F(w)` after it. Along the
straight path from 0 to `w`, the change is an integral over the shares of all entries,

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

from nsl_keras.backend import Tensor

#: Gauss-Legendre nodes of the integral: exact for polynomials in `t` up to degree 63.
PATH_POINTS = 32


class Neighbors(NamedTuple):
    """The dictionary entries that an example attends to, or that moved its outputs most.

    Compare `after` with `before` first: entries explain a prediction only as far as
    adaptation changed it.

    Attributes:
        indices: Entry numbers, of shape `(batch, k)`, strongest entry first.
        weights: Attention weights, of the same shape.
        values: Class probabilities or regression targets of the entries, of shape
            `(batch, k, outputs)`.
        output_changes: The contribution of each entry to the example's logits (or
            regression outputs), of shape `(batch, k, outputs)`. Over all entries they sum
            to `after - before`. Each contribution is an integral over the path from no
            attention to the actual attention, computed from 32 points. For one step it is
            exact on a `Dense` layer, and exact to rounding on a `CosineDense` layer. The
            error grows with the inner learning rate and the steps, most through ReLU
            layers: compare the sum over all entries with `after - before`.
        before: The outputs without adaptation, of shape `(batch, outputs)`.
        after: The outputs with adaptation, of the same shape.
    """

    indices: Any
    weights: Any
    values: Any
    output_changes: Any
    before: Any
    after: Any


def average_over_path(
    slopes: Callable[[Tensor], list[Tensor]], start: list[Tensor]
) -> list[Tensor]:
    """Returns the integrals of `slopes(t)`, a list of tensors, over `t` from 0 to 1.

    `start` are zeros of the same shapes.
    """
    nodes, weights = np.polynomial.legendre.leggauss(PATH_POINTS)
    times, weights = (
        ops.convert_to_tensor(values, start[0].dtype)
        for values in ((nodes + 1) / 2, weights / 2)
    )

    def add(point: Tensor, totals: list[Tensor]) -> list[Tensor]:
        found = slopes(times[point])
        return [
            total + weights[point] * slope
            for total, slope in zip(totals, found, strict=True)
        ]

    integrals: list[Tensor] = ops.fori_loop(0, PATH_POINTS, add, start)
    return integrals
