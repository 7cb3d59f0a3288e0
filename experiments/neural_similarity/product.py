"""A similarity of several factors: deep factorization, Section 5.1."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import similarities


@keras.saving.register_keras_serializable("experiments")
class Product(similarities.Similarity):
    """Product of several unconstrained similarities: `M = M_1 M_2 ... M_n`.

    The factors stand in one weight with an axis of `factors` in front. Descent on more
    factors favors a lower rank, above all if they start near zero. `M_1` starts at the
    initial `M`, the others at the identity. Static layers alone; they fold as with one `M`.

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 5.1, on deep matrix
        factorization (Arora et al., NeurIPS 2019).
    """

    static_only = True

    def __init__(self, factors: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factors = factors

    def parameters_from(self, matrix: np.ndarray) -> Any:
        identity = np.eye(len(matrix), dtype=matrix.dtype)
        return np.stack([matrix, *[identity] * (self.factors - 1)])

    def matrix(self, parameters: Any, size: int) -> Any:
        return functools.reduce(ops.matmul, ops.unstack(parameters, self.factors, axis=-3))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factors": self.factors}
