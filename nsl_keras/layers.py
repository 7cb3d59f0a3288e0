"""Public layers."""

from nsl_keras.neighborhoods.cosine_dense import CosineDense
from nsl_keras.neighborhoods.dictionary import NeighborDictionary
from nsl_keras.neighborhoods.film import InstanceFiLM
from nsl_keras.neighborhoods.head import MetaNeighborhoodHead
from nsl_keras.similarity.convolution import NeuralSimilarityConv2D
from nsl_keras.similarity.sphere import SphereConv2D

__all__ = [
    "CosineDense",
    "InstanceFiLM",
    "MetaNeighborhoodHead",
    "NeighborDictionary",
    "NeuralSimilarityConv2D",
    "SphereConv2D",
]
