"""Small networks that predict the similarity matrix of a dynamic layer from its input.

A *kind* names the network: a function that returns its layers. `SimilarityPredictor` makes
them convolutions, at the positions that the layer served stands at;
`DenseSimilarityPredictor` makes them dense layers.
"""

from nsl_keras.similarity.predictors.base import KINDS, Predictor, small_normal
from nsl_keras.similarity.predictors.convolutional import SimilarityPredictor
from nsl_keras.similarity.predictors.cost import cost_ratio, multiply_adds, name_costly
from nsl_keras.similarity.predictors.dense import DenseSimilarityPredictor
from nsl_keras.similarity.predictors.kinds import get, published, register
from nsl_keras.similarity.predictors.shared import SharedSimilarityPredictor

__all__ = [
    "KINDS",
    "DenseSimilarityPredictor",
    "Predictor",
    "SharedSimilarityPredictor",
    "SimilarityPredictor",
    "cost_ratio",
    "get",
    "multiply_adds",
    "name_costly",
    "published",
    "register",
    "small_normal",
]
