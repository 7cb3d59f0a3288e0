"""Public predictors of dynamic similarities."""

from nsl_keras.similarity.dense_predictor import DenseSimilarityPredictor
from nsl_keras.similarity.predictors import (
    SharedSimilarityPredictor,
    SimilarityPredictor,
)

__all__ = [
    "DenseSimilarityPredictor",
    "SharedSimilarityPredictor",
    "SimilarityPredictor",
]
