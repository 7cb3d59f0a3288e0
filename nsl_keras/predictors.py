"""Public predictors of dynamic similarities."""

from nsl_keras.similarity.predictors import SimilarityPredictor

__all__ = ["SimilarityPredictor"]
