"""Public predictors of dynamic similarities."""

from nsl_keras.similarity.predictors import (
    SharedSimilarityPredictor,
    SimilarityPredictor,
)

__all__ = ["SharedSimilarityPredictor", "SimilarityPredictor"]
