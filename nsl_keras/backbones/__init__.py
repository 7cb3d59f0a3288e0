"""Networks of the papers, as functional Keras models.

Each takes `convolution=`, a callable that is given the arguments of `keras.layers.Conv2D`
and returns a layer: a class, a `functools.partial` of one, or a function that decides by
kernel size or name. It makes the convolutions that the papers give a similarity; 1x1
convolutions and classifiers are Keras's own. iFiLM is added by `convert.add_film`.
"""

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
