"""Public predictors of dynamic similarities."""

from nsl_keras.similarity.predictors import SimilarityPredictor, get
from nsl_keras.similarity.shared_predictor import SharedSimilarityPredictor

__all__ = ["SharedSimilarityPredictor", "SimilarityPredictor", "get"]
