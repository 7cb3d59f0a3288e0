"""Public layers."""

from nsl_keras.neighborhoods.cosine import CosineDense
from nsl_keras.neighborhoods.dictionary import NeighborDictionary
from nsl_keras.neighborhoods.film import InstanceFiLM
from nsl_keras.neighborhoods.head import MetaNeighborhoodHead
from nsl_keras.normalization import BatchNormalization
from nsl_keras.similarity.convolution import (
    NeuralSimilarityConv1D,
    NeuralSimilarityConv2D,
    NeuralSimilarityConv3D,
    NeuralSimilarityDepthwiseConv2D,
    NeuralSimilaritySeparableConv2D,
)
from nsl_keras.similarity.dense import NeuralSimilarityDense
from nsl_keras.similarity.einsum import NeuralSimilarityEinsumDense
from nsl_keras.similarity.global_similarity import GlobalNeuralSimilarity2D
from nsl_keras.similarity.recurrent import (
    NeuralSimilarityGRU,
    NeuralSimilarityGRUCell,
    NeuralSimilarityLSTM,
    NeuralSimilarityLSTMCell,
    NeuralSimilaritySimpleRNN,
    NeuralSimilaritySimpleRNNCell,
)
from nsl_keras.similarity.sphere import SphereConv2D, SphereDense
from nsl_keras.similarity.transposed import NeuralSimilarityConv2DTranspose

__all__ = [
    "BatchNormalization",
    "CosineDense",
    "GlobalNeuralSimilarity2D",
    "InstanceFiLM",
    "MetaNeighborhoodHead",
    "NeighborDictionary",
    "NeuralSimilarityConv1D",
    "NeuralSimilarityConv2D",
    "NeuralSimilarityConv2DTranspose",
    "NeuralSimilarityConv3D",
    "NeuralSimilarityDense",
    "NeuralSimilarityDepthwiseConv2D",
    "NeuralSimilarityEinsumDense",
    "NeuralSimilarityGRU",
    "NeuralSimilarityGRUCell",
    "NeuralSimilarityLSTM",
    "NeuralSimilarityLSTMCell",
    "NeuralSimilaritySeparableConv2D",
    "NeuralSimilaritySimpleRNN",
    "NeuralSimilaritySimpleRNNCell",
    "SphereConv2D",
    "SphereDense",
]
