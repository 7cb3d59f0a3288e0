"""Public layers."""

from nsl_keras.neighborhoods.cosine import CosineDense as CosineDense
from nsl_keras.neighborhoods.dictionary import NeighborDictionary as NeighborDictionary
from nsl_keras.neighborhoods.film import InstanceFiLM as InstanceFiLM
from nsl_keras.neighborhoods.head import MetaNeighborhoodHead as MetaNeighborhoodHead
from nsl_keras.normalization import BatchNormalization as BatchNormalization
from nsl_keras.similarity.convolution import (
    NeuralSimilarityConv1D as NeuralSimilarityConv1D,
    NeuralSimilarityConv2D as NeuralSimilarityConv2D,
    NeuralSimilarityConv3D as NeuralSimilarityConv3D,
    NeuralSimilarityDepthwiseConv2D as NeuralSimilarityDepthwiseConv2D,
    NeuralSimilaritySeparableConv2D as NeuralSimilaritySeparableConv2D,
)
from nsl_keras.similarity.dense import NeuralSimilarityDense as NeuralSimilarityDense
from nsl_keras.similarity.einsum import (
    NeuralSimilarityEinsumDense as NeuralSimilarityEinsumDense,
)
from nsl_keras.similarity.global_similarity import (
    GlobalNeuralSimilarity2D as GlobalNeuralSimilarity2D,
)
from nsl_keras.similarity.recurrent import (
    NeuralSimilarityGRU as NeuralSimilarityGRU,
    NeuralSimilarityGRUCell as NeuralSimilarityGRUCell,
    NeuralSimilarityLSTM as NeuralSimilarityLSTM,
    NeuralSimilarityLSTMCell as NeuralSimilarityLSTMCell,
    NeuralSimilaritySimpleRNN as NeuralSimilaritySimpleRNN,
    NeuralSimilaritySimpleRNNCell as NeuralSimilaritySimpleRNNCell,
)
from nsl_keras.similarity.sphere import (
    SphereConv2D as SphereConv2D,
    SphereDense as SphereDense,
)
from nsl_keras.similarity.transposed import (
    NeuralSimilarityConv2DTranspose as NeuralSimilarityConv2DTranspose,
)
