"""Regularizers of a similarity `M`, and one that keeps filters of a kernel apart."""

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


def _require_square(matrices: Tensor) -> None:
    shape = tuple(matrices.shape)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(
            "The regularizer must be applied to square matrices, as a "
            f"`similarity_regularizer` is. Received: shape={shape}"
        )


@keras.saving.register_keras_serializable("nsl_keras")
class TowardsIdentity(keras.regularizers.Regularizer):
    """Regularizer that draws a similarity `M` toward the identity.

        l1 * sum |M - I| + l2 * sum (M - I)^2

    Decay thus leads to the plain layer; `"l2"` would switch the layer off.

    Args:
        l1: float, at least 0; it makes `M - I` sparse.
        l2: float, at least 0.

    Raises:
        ValueError: If `l1` or `l2` is negative or not finite; if it is applied to anything
            but square matrices.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> regularizer = nsl_keras.regularizers.TowardsIdentity(l2=0.5)
    >>> float(regularizer(keras.ops.eye(3))), float(regularizer(keras.ops.zeros((3, 3))))
    (0.0, 1.5)
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(
    ...     4, 3, similarity="unconstrained", similarity_regularizer=regularizer)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.4. The authors'
        code draws `M` toward zero.
    """

    def __init__(self, l1: float = 0.0, l2: float = 0.01) -> None:
        self.l1 = validation.non_negative_number(l1, "l1")
        self.l2 = validation.non_negative_number(l2, "l2")

    def __call__(self, x: Tensor) -> Tensor:
        _require_square(x)
        change = x - ops.eye(x.shape[-1], dtype=x.dtype)
        return self.l1 * ops.sum(ops.abs(change)) + self.l2 * ops.sum(ops.square(change))

    def get_config(self) -> dict[str, Any]:
        return {"l1": self.l1, "l2": self.l2}


@keras.saving.register_keras_serializable("nsl_keras")
class NuclearNorm(keras.regularizers.Regularizer):
    """Regularizer that draws a similarity `M` toward a low rank.

    The penalty is `rate` times the sum of the singular values of `M`. Its gradient is
    defined everywhere, second derivatives only where the singular values differ.

    Args:
        rate: float, at least 0.

    Raises:
        ValueError: If `rate` is negative or not finite; if it is applied to anything but
            square matrices.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> regularizer = nsl_keras.regularizers.NuclearNorm(0.5)
    >>> round(float(regularizer(keras.ops.eye(3))), 5)
    1.5

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 5.1, expects that
        descent on `M` favours a small nuclear norm by itself; this penalty asks for it.
    """

    def __init__(self, rate: float = 0.01) -> None:
        self.rate = validation.non_negative_number(rate, "rate")

    def __call__(self, x: Tensor) -> Tensor:
        _require_square(x)
        wide = ops.cast(x, keras.backend.result_type(x.dtype, "float32"))
        return self.rate * ops.sum(ops.svd(wide, compute_uv=False))

    def get_config(self) -> dict[str, Any]:
        return {"rate": self.rate}
