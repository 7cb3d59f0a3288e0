"""Feature extractors of the papers, as functional Keras models."""

from nsl_keras.backbones.cnn import convnet4
from nsl_keras.backbones.resnet import resnet_v2

__all__ = ["convnet4", "resnet_v2"]
