"""The plain networks of Neural Similarity Learning's tables, and a small MobileNet."""

from collections.abc import Sequence

import keras

from nsl_keras import backbones
from nsl_keras.backbones import Factory, Units, he_normal, height_and_width
from nsl_keras.layers import BatchNormalization


def cnn9(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    classes: int | None = 10,
    convolution: Factory = keras.layers.Conv2D,
    variant: str = "code",
    plus: bool = False,
    filters: Sequence[int] | None = None,
    batch_normalization: Factory = BatchNormalization,
) -> keras.Model:
    """CNN-9 (Section 7.1, Table 7), and CNN++, which is deeper and wider with `plus`.

    `variant="code"` is `nsl_keras.backbones.cnn9`. `"paper"` has no plain convolution
    before the stages, and a fully connected layer of 256 units after them: 1,008,800
    parameters. CNN++ has four convolutions per stage; the paper does not give its widths.
    These make 2,054,525 parameters (`"code"`) and 2,551,746 (`"paper"`).
    """
    if variant == "code" and not plus:
        return backbones.cnn9(
            input_shape, classes, convolution, filters or (32, 64, 128), batch_normalization
        )
    if filters is None:
        wider = {"code": (55, 110, 220), "paper": (51, 102, 204)}[variant]
        filters = wider if plus else (32, 64, 128)
    layers = Units(convolution, batch_normalization)
    inputs = outputs = keras.Input(input_shape)
    if variant == "code":
        outputs = layers.unit(outputs, filters[0], 3, "root", plain=True)
    for index, width in enumerate(filters):
        outputs = layers.stage(outputs, width, 4 if plus else 3, f"stage_{index}")
    if variant == "paper":
        outputs = _fully_connected(outputs, layers, 256, classes)
    else:
        left = height_and_width(outputs.shape[1:])
        outputs = layers.convolve(
            outputs, classes, left, "classifier", plain=True, padding="valid"
        )
        outputs = keras.layers.Flatten(name="logits")(outputs)
    return keras.Model(inputs, outputs, name="cnn9")


def cnn10(
    input_shape: tuple[int, int, int] = (224, 224, 3),
    classes: int | None = 1000,
    convolution: Factory = keras.layers.Conv2D,
    plus: bool = False,
    filters: Sequence[int] | None = None,
    batch_normalization: Factory = BatchNormalization,
) -> keras.Model:
    """CNN-10 for ImageNet (Tables 5 and 7), and CNN-10++ with `plus`.

    A 7x7 convolution of stride 2, pooling, three stages of three 3x3 convolutions, a fully
    connected layer of 512 units. The counts of Table 5 (8.90 million parameters, 9.61 with
    dynamic DNS) imply predictors with 64 hidden filters, at the nine 3x3 convolutions only.
    CNN-10++ has four convolutions a stage, and widths that make 9.71 million parameters, as
    in Table 5; the paper does not give them.
    """
    if filters is None:
        filters = (66, 130, 256) if plus else (64, 128, 256)
    layers = Units(convolution, batch_normalization)
    inputs = keras.Input(input_shape)
    outputs = layers.unit(inputs, 64, 7, "root", plain=True, strides=2)
    pool = keras.layers.MaxPooling2D(3, strides=2, padding="same", name="root_pool")
    outputs = pool(outputs)
    for index, width in enumerate(filters):
        outputs = layers.stage(outputs, width, 4 if plus else 3, f"stage_{index}")
    outputs = _fully_connected(outputs, layers, 512, classes)
    return keras.Model(inputs, outputs, name="cnn10")


def _fully_connected(outputs, layers: Units, width: int, classes: int | None):
    """A fully connected layer with batch norm and ReLU, and the classifier if asked."""
    outputs = keras.layers.Flatten()(outputs)
    options = {"use_bias": False, "kernel_initializer": he_normal()}
    outputs = keras.layers.Dense(width, name="fully_connected", **options)(outputs)
    outputs = layers.activate(outputs, "fully_connected")
    if classes is None:
        return outputs
    options["kernel_initializer"] = he_normal()
    return keras.layers.Dense(classes, name="classifier", **options)(outputs)


def mobile_net(
    input_shape: tuple[int, int, int],
    classes: int,
    convolution: Factory = keras.layers.DepthwiseConv2D,
    batch_normalization: Factory = keras.layers.BatchNormalization,
    filters: Sequence[int] = (32, 64, 128),
) -> keras.Model:
    """MobileNet (Howard et al., 2017) in small: three stages of three blocks.

    `convolution` makes the depthwise convolution of each block, of a kernel size.
    """
    layers = keras.layers
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(filters[0], 3, padding="same", use_bias=False, name="root")(inputs)
    x = layers.ReLU()(batch_normalization()(x))
    for stage, width in enumerate(filters):
        for block in range(3):
            name = f"stage_{stage}_block_{block}"
            x = convolution(3, padding="same", use_bias=False, name=name)(x)
            x = layers.ReLU()(batch_normalization()(x))
            x = layers.Conv2D(width, 1, use_bias=False, name=f"{name}_pointwise")(x)
            x = layers.ReLU()(batch_normalization()(x))
        x = layers.MaxPooling2D()(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(classes, name="classifier")(x))
