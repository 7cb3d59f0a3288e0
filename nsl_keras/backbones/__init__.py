"""Feature extractors of the papers, as functional Keras models."""

from nsl_keras.backbones.cnn import cnn4, cnn9, cnn10, convnet4
from nsl_keras.backbones.densenet import densenet_bc
from nsl_keras.backbones.resnet import resnet18, resnet50, resnet_v2
from nsl_keras.backbones.spherenet import self_attention_spherenet

__all__ = [
    "cnn4",
    "cnn9",
    "cnn10",
    "convnet4",
    "densenet_bc",
    "resnet18",
    "resnet50",
    "resnet_v2",
    "self_attention_spherenet",
]
