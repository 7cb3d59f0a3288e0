"""Networks of the papers, as functional Keras models.

`convolution=` is a callable that takes the arguments of `keras.layers.Conv2D` and returns a
layer: a class, a `functools.partial` of one, or a function that decides by kernel size or
name. It makes the convolutions that may have a similarity in the papers; 1x1 convolutions
and classifiers are Keras's own. `convert.add_film` adds iFiLM.

`batch_normalization=` is the same for `keras.layers.BatchNormalization`. The moving
statistics of the default are unbiased from the first step on. With Keras's own layer they
are those of the authors' code only approximately.
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
