"""Residual networks: of Meta-Neighborhoods, and for ImageNet."""

from collections.abc import Sequence

import keras

from nsl_keras.backbones import FAST_BATCH_NORMALIZATION, Factory, Units, he_normal
from nsl_keras.layers import BatchNormalization


def resnet_v2(
    depth: int = 29,
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    convolution: Factory = keras.layers.Conv2D,
    final_relu: bool = False,
    batch_normalization: Factory = FAST_BATCH_NORMALIZATION,
) -> keras.Model:
    """A pre-activation bottleneck ResNet of depth `9n + 2` for small images, to features.

    A 3x3 convolution to 16 channels and three stages of `n` blocks (1x1 to 16/64/128, 3x3,
    1x1 to 64/128/256; stride 2 at the second and third stage): 256 features. The paper
    (Section 4.2) has 29 (838,160 parameters) and 56 (1,655,120); layout from the authors'
    code.
    """
    blocks, rest = divmod(depth - 2, 9)
    if rest or blocks < 1:
        raise ValueError(f"`depth` must be of the form 9n + 2. Received: depth={depth}")
    layers = Units(convolution, batch_normalization, keras.initializers.GlorotUniform)
    inputs = keras.Input(input_shape)
    outputs = layers.unit(inputs, 16, 3, "root")
    for stage, (inner, outer) in enumerate(((16, 64), (64, 128), (128, 256))):
        for block in range(blocks):
            at = f"stage_{stage}_block_{block}"
            stride = 2 if stage > 0 and block == 0 else 1
            if stage == block == 0:
                # The root has normalized it. An iFiLM can follow this layer.
                branch = keras.layers.Identity(name=f"{at}_layer_1_input")(outputs)
            else:
                branch = layers.activate(outputs, f"{at}_layer_1")
            branch = layers.convolve(branch, inner, 1, f"{at}_layer_1", strides=stride)
            branch = layers.activate(branch, f"{at}_layer_2")
            branch = layers.convolve(branch, inner, 3, f"{at}_layer_2")
            branch = layers.activate(branch, f"{at}_layer_3")
            branch = layers.convolve(branch, outer, 1, f"{at}_layer_3")
            if block == 0:
                shortcut = f"{at}_shortcut"
                outputs = layers.convolve(outputs, outer, 1, shortcut, strides=stride)
            outputs = keras.layers.Add(name=f"{at}_add")([outputs, branch])
    outputs = (layers.activate if final_relu else layers.normalize)(outputs, "final")
    outputs = keras.layers.GlobalAveragePooling2D(name="pool")(outputs)
    return keras.Model(inputs, outputs, name=f"resnet_v2_{depth}")


def resnet_v1(
    depth: int,
    input_shape: tuple[int | None, int | None, int] = (224, 224, 3),
    classes: int = 1000,
    convolution: Factory = keras.layers.Conv2D,
    filters: Sequence[int] = (64, 128, 256, 512),
    batch_normalization: Factory = BatchNormalization,
) -> keras.Model:
    """The post-activation ResNet-18 or ResNet-50 (He et al., 2016) for ImageNet.

    They have 11,689,512 and 25,557,032 parameters. The first 1x1 convolution of a block of
    ResNet-50 has the stride, as in `keras.applications.ResNet50`, whose convolutions have a
    bias besides. `convolution` makes the 3x3 convolutions and the 7x7 one, of the first of
    `filters`. With similarity: the authors' response to the reviews, Table 2.
    """
    # Blocks a stage, and the kernel sizes of a block; its last convolution may be wider.
    counts, sizes, widening = {
        18: ((2, 2, 2, 2), (3, 3), 1),
        50: ((3, 4, 6, 3), (1, 3, 1), 4),
    }[depth]
    layers = Units(convolution, batch_normalization)
    inputs = keras.Input(input_shape)
    outputs = _unit(layers, inputs, filters[0], 7, stride=2, name="root")
    # Zeros are as good as -inf after a ReLU.
    outputs = keras.layers.ZeroPadding2D(1, name="root_pool_padding")(outputs)
    outputs = keras.layers.MaxPooling2D(3, strides=2, name="root_pool")(outputs)
    channels = filters[0]
    for stage, (count, width) in enumerate(zip(counts, filters, strict=True)):
        for index in range(count):
            at = f"stage_{stage}_block_{index}"
            stride = 2 if stage > 0 and index == 0 else 1
            branch, strides = outputs, stride
            for number, size in enumerate(sizes[:-1], start=1):
                name = f"{at}_layer_{number}"
                branch, strides = _unit(layers, branch, width, size, strides, name), 1
            name = f"{at}_layer_{len(sizes)}"
            branch = layers.convolve(branch, widening * width, sizes[-1], name)
            branch = layers.normalize(branch, name)
            if stride > 1 or widening * width != channels:
                own = {"name": f"{at}_shortcut", "strides": stride}
                outputs = layers.convolve(outputs, widening * width, 1, **own)
                outputs = layers.normalize(outputs, own["name"])
            outputs = keras.layers.Add(name=f"{at}_add")([outputs, branch])
            outputs = keras.layers.ReLU(name=f"{at}_relu")(outputs)
            channels = widening * width
    outputs = keras.layers.GlobalAveragePooling2D(name="pool")(outputs)
    options = {"kernel_initializer": he_normal(), "name": "classifier"}
    outputs = keras.layers.Dense(classes, **options)(outputs)
    return keras.Model(inputs, outputs, name=f"resnet{depth}")


def _unit(layers: Units, inputs, width: int, size: int, stride: int, name: str):
    """Convolution, batch norm and ReLU; with strides, zeros on all sides alike."""
    padding = "same"
    if stride > 1 and size > 1:
        # "same" would pad one side of the image with the odd row of zeros.
        inputs = keras.layers.ZeroPadding2D(size // 2, name=f"{name}_padding")(inputs)
        padding = "valid"
    return layers.unit(inputs, width, size, name, strides=stride, padding=padding)
