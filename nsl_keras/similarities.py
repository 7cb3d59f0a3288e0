"""Public similarities: what the matrix `M` of a layer may be."""

from nsl_keras.similarity.matrices import (
    Diagonal,
    Similarity,
    Unconstrained,
    get,
    serialize,
)

__all__ = ["Diagonal", "Similarity", "Unconstrained", "get", "serialize"]
