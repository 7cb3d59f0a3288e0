"""A regularizer that keeps the filters of hyperspherical layers apart."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor


@keras.saving.register_keras_serializable("nsl_keras")
class OrthogonalityRegularizer(keras.regularizers.Regularizer):
    """Regularizer that draws filters toward an orthonormal set.

    For a kernel `W` with the filters on its last axis,

        strength * ||F^T F - I||^2 + l2 * ||F||^2,   F = reshape(W, (-1, filters))

    in Frobenius norms. `keras.regularizers.OrthogonalRegularizer` ignores lengths, and
    takes only matrices.

    Args:
        strength: float, at least 0, the weight of the distance from orthonormality.
        l2: float, at least 0, the weight of an additional `keras.regularizers.L2`.

    Raises:
        ValueError: If `strength` or `l2` is negative or not finite.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> regularizer = nsl_keras.regularizers.OrthogonalityRegularizer(0.5)
    >>> float(regularizer(keras.ops.eye(3))), float(regularizer(keras.ops.zeros((3, 3))))
    (0.0, 1.5)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Appendix B.2. The authors
        use strength 1e-4 on every SphereConv, and `l2=2.5e-4` on attention kernels.
    """

    def __init__(self, strength: float = 1e-4, l2: float = 0.0) -> None:
        self.strength = validation.non_negative_number(strength, "strength")
        self.l2 = validation.non_negative_number(l2, "l2")

    def __call__(self, x: Tensor) -> Tensor:
        filters = x.shape[-1]
        matrix = ops.reshape(x, (-1, filters))
        products = ops.matmul(ops.transpose(matrix), matrix)
        distance = ops.sum(ops.square(products - ops.eye(filters, dtype=products.dtype)))
        return self.strength * distance + self.l2 * ops.sum(ops.square(matrix))

    def get_config(self) -> dict[str, Any]:
        return {"strength": self.strength, "l2": self.l2}
