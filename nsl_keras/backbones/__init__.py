"""Three networks of the papers, as functional Keras models.

`convolution=` takes a callable with the arguments of `keras.layers.Conv2D` that returns a
layer: a class, a `functools.partial`, or a function that decides by kernel size or name. It
makes the convolutions that have a similarity in the papers; all others are Keras layers.
`batch_normalization=` does the same for `keras.layers.BatchNormalization`.
"""

from nsl_keras.backbones.cnn import cnn4, cnn9, convnet4

__all__ = ["cnn4", "cnn9", "convnet4"]
