"""Public predictors of dynamic similarities."""

from nsl_keras.similarity.predictors import (
    DenseSimilarityPredictor,
    SharedSimilarityPredictor,
    SimilarityPredictor,
    get,
    published,
    register,
)

__all__ = [
    "DenseSimilarityPredictor",
    "SharedSimilarityPredictor",
    "SimilarityPredictor",
    "get",
    "published",
    "register",
]
