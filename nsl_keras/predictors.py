"""Public predictors of dynamic similarities."""

from nsl_keras.similarity.predictors import (
    SharedSimilarityPredictor,
    SimilarityPredictor,
    get,
    published,
)

__all__ = [
    "SharedSimilarityPredictor",
    "SimilarityPredictor",
    "get",
    "published",
]
