"""Public predictors of dynamic similarities."""

from nsl_keras.similarity.predictors import (
    SimilarityPredictor as SimilarityPredictor,
    get as get,
)
from nsl_keras.similarity.shared_predictor import (
    SharedSimilarityPredictor as SharedSimilarityPredictor,
)
