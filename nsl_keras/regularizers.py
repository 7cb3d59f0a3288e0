"""The regularizer that pulls a similarity `M` toward the identity."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor


@keras.saving.register_keras_serializable("nsl_keras")
class TowardsIdentity(keras.regularizers.Regularizer):
    """Regularizer that pulls a similarity `M` toward the identity.

        l1 * sum |M - I| + l2 * sum (M - I)^2

    Args:
        l1: float, at least 0; makes `M - I` sparse.
        l2: float, at least 0.

    Raises:
        ValueError: If `l1` or `l2` is negative or not finite, or `M` is not square.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> regularizer = nsl_keras.regularizers.TowardsIdentity(l2=0.5)
    >>> float(regularizer(keras.ops.eye(3))), float(regularizer(keras.ops.zeros((3, 3))))
    (0.0, 1.5)
    >>> similarity = nsl_keras.similarities.Unconstrained(regularizer=regularizer)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.4. The authors'
        code pulls `M` toward zero.
    """

    def __init__(self, l1: float = 0.0, l2: float = 0.01) -> None:
        self.l1 = validation.non_negative_number(l1, "l1")
        self.l2 = validation.non_negative_number(l2, "l2")

    def __call__(self, x: Tensor) -> Tensor:
        shape = tuple(x.shape)
        square = len(shape) >= 2 and shape[-1] == shape[-2]
        demand = "that of square matrices: this is a `regularizer` of similarities"
        validation.require(square, "shape", demand, shape)
        change = x - ops.eye(x.shape[-1], dtype=x.dtype)
        return self.l1 * ops.sum(ops.abs(change)) + self.l2 * ops.sum(ops.square(change))

    def get_config(self) -> dict[str, Any]:
        return {"l1": self.l1, "l2": self.l2}
