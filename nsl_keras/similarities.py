"""Public similarities: the matrices that the `M` of a layer may be."""

from nsl_keras.similarity.matrices import (
    Diagonal,
    Full,
    PositiveSemidefinite,
    Similarity,
    Sparse,
    Symmetric,
    Unconstrained,
    get,
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
]
