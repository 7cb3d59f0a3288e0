"""Public similarities: what the matrix `M` of a layer may be."""

from nsl_keras.similarity.matrices import (
    Diagonal,
    Full,
    PositiveSemidefinite,
    Similarity,
    Sparse,
    Symmetric,
    Unconstrained,
    get,
    register,
    serialize,
)

__all__ = [
    "Diagonal",
    "Full",
    "PositiveSemidefinite",
    "Similarity",
    "Sparse",
    "Symmetric",
    "Unconstrained",
    "get",
    "register",
    "serialize",
]
