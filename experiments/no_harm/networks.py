"""Small networks as one writes them with Keras, for images of 8x8 pixels and more."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import keras
from keras import layers

import nsl_keras

Tensor = keras.KerasTensor
MakeLayer = Callable[..., keras.layers.Layer]

WIDTHS = (16, 32, 64)
#: Keras's default, 0.99, needs more steps than these trainings have.
MOMENTUM = 0.9
#: Batch norms by name: Keras's, and this package's, which are unbiased from the first step.
BATCH_NORMS: dict[str, MakeLayer] = {
    "keras": layers.BatchNormalization,
    "unbiased": nsl_keras.layers.BatchNormalization,
}
CLASSIFIER = "classifier"


class Network(NamedTuple):
    """A kind of network, from inputs to features, and whether it has batch norms."""

    title: str
    features: Callable[[Tensor, MakeLayer, MakeLayer], Tensor]
    batch_norm: bool = True

    def make(
        self,
        input_shape: tuple[int, ...],
        classes: int,
        convolution: MakeLayer = layers.Conv2D,
        batch_norm: MakeLayer = layers.BatchNormalization,
    ) -> keras.Model:
        """Returns the network, whose last layer is `Dense` and gives logits."""
        inputs = keras.Input(input_shape)
        features = self.features(inputs, convolution, batch_norm)
        return keras.Model(inputs, layers.Dense(classes, name=CLASSIFIER)(features))


def narrow_cnn(x: Tensor, convolution: MakeLayer, batch_norm: MakeLayer) -> Tensor:
    """Two convolutions a stage with batch norm and ReLU, and global average pooling."""
    unit = functools.partial(_normalized, convolution, batch_norm)
    for stage, filters in enumerate(WIDTHS):
        if stage:
            x = layers.MaxPooling2D()(x)
        for number in range(2):
            x = unit(x, filters, f"stage_{stage}_unit_{number}")
            x = layers.ReLU()(x)
    return layers.GlobalAveragePooling2D()(x)


def small_resnet(x: Tensor, convolution: MakeLayer, batch_norm: MakeLayer) -> Tensor:
    """A convolution, then a residual block a stage, and global average pooling."""
    unit = functools.partial(_normalized, convolution, batch_norm)
    x = layers.ReLU()(unit(x, WIDTHS[0], "root"))
    for stage, filters in enumerate(WIDTHS):
        strides, name = (2 if stage else 1), f"stage_{stage}"
        shortcut = x
        if stage:
            shortcut = unit(x, filters, f"{name}_shortcut", 1, strides)
        x = unit(x, filters, f"{name}_first", 3, strides)
        x = unit(layers.ReLU()(x), filters, f"{name}_second")
        x = layers.ReLU()(layers.Add()([x, shortcut]))
    return layers.GlobalAveragePooling2D()(x)


def no_batch_norm(x: Tensor, convolution: MakeLayer, batch_norm: MakeLayer) -> Tensor:
    """Three convolutions with ReLU, and a hidden dense layer."""
    for stage, filters in enumerate(WIDTHS):
        if stage:
            x = layers.MaxPooling2D()(x)
        options = {"padding": "same", "activation": "relu", "name": f"stage_{stage}"}
        x = convolution(filters, 3, **options)(x)
    return layers.Dense(64, activation="relu", name="hidden")(layers.Flatten()(x))


def _normalized(
    convolution: MakeLayer,
    batch_norm: MakeLayer,
    x: Tensor,
    filters: int,
    name: str,
    kernel_size: int = 3,
    strides: int = 1,
) -> Tensor:
    x = convolution(filters, kernel_size, strides=strides, padding="same", name=name)(x)
    return batch_norm(momentum=MOMENTUM, name=f"{name}_normalization")(x)


NETWORKS = {
    "narrow_cnn": Network("narrow CNN", narrow_cnn),
    "small_resnet": Network("small ResNet", small_resnet),
    "no_batch_norm": Network("no batch norm", no_batch_norm, batch_norm=False),
}
