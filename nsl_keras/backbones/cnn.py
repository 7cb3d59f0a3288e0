"""Plain convolutional networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.backbones.units import (
    FAST_BATCH_NORMALIZATION,
    GLOROT,
    Factory,
    Units,
    check_images,
    height_and_width,
)
from nsl_keras.backend import Tensor
from nsl_keras.training.normalization import BatchNormalization


def convnet4(
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    filters: int | Sequence[int] = (24, 96, 192, 192),
    convolution: Factory = keras.layers.Conv2D,
    batch_normalization: Factory = FAST_BATCH_NORMALIZATION,
    kernel_regularizer: Any = None,
    name: str = "convnet4",
) -> keras.Model:
    """Returns the 4-layer ConvNet of Meta-Neighborhoods as a feature extractor.

    It has four 3x3 convolutions with batch norm. ReLU and 3x3 max pooling of stride 2
    ("valid") follow the first two, ReLU the third, and global average pooling without a
    ReLU the last. By default it has 520,056 trainable parameters.

    Args:
        input_shape: tuple of 3, height, width and channels (in the order of
            `keras.config.image_data_format()`); at least 7x7 pixels.
        filters: int or 4 ints, the filters of the convolutions.
        convolution: Callable that takes the arguments of `keras.layers.Conv2D` and returns
            a layer; makes all four convolutions.
        batch_normalization: Callable that takes the arguments of
            `keras.layers.BatchNormalization` and returns a layer. The default is
            `nsl_keras.layers.BatchNormalization` with momentum 0.9. Keras's own layer
            matches the authors' moving statistics only approximately.
        kernel_regularizer: Regularizer of all kernels.
        name: str, the model's name.

    Returns:
        A `keras.Model` from images to features of shape `(batch, filters[-1])`.

    Raises:
        ValueError: If the images are too small or `filters` is invalid.

    Example:

    >>> import nsl_keras
    >>> model = nsl_keras.backbones.convnet4((32, 32, 3))
    >>> model.count_params(), model.output_shape
    (521068, (None, 192))

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 4.2; widths and pooling from
        the authors' code ("shallownet").
    """
    widths = validation.positive_integers(filters, 4, "filters")
    check_images(input_shape, 7)
    layers = Units(convolution, batch_normalization, kernel_regularizer, GLOROT)
    inputs = keras.Input(input_shape)
    outputs = layers.unit(inputs, widths[0], 3, "layer_0")
    outputs = keras.layers.MaxPooling2D(3, strides=2, name="layer_0_pool")(outputs)
    outputs = layers.unit(outputs, widths[1], 3, "layer_1")
    outputs = keras.layers.MaxPooling2D(3, strides=2, name="layer_1_pool")(outputs)
    outputs = layers.unit(outputs, widths[2], 3, "layer_2")
    outputs = layers.convolve(outputs, widths[3], 3, "layer_3")
    outputs = layers.normalize(outputs, "layer_3")
    outputs = keras.layers.GlobalAveragePooling2D(name="pool")(outputs)
    return keras.Model(inputs, outputs, name=name)


def cnn9(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    classes: int | None = 10,
    convolution: Factory = keras.layers.Conv2D,
    variant: str = "code",
    plus: bool = False,
    filters: int | Sequence[int] | None = None,
    batch_normalization: Factory = BatchNormalization,
    kernel_regularizer: Any = None,
    name: str = "cnn9",
) -> keras.Model:
    """Returns the CNN-9 of Neural Similarity Learning, for CIFAR images.

    It has three stages of three 3x3 convolutions (32, 64 and 128 filters, batch norm,
    ReLU), each followed by 2x2 max pooling. The authors' code and the paper differ in the
    rest:

    * `variant="code"`: a plain 3x3 convolution of 32 filters (batch norm, ReLU) before
      the stages, and a "valid" convolution over the remaining map as classifier. It has
      511,200 trainable parameters for 10 classes; 511,281 with static DNS, 511,929 with
      static UNS. With the authors' predictors (`nsl_keras.predictors.published`) dynamic
      DNS has 890,946 and dynamic UNS 2,014,560.
    * `variant="paper"`: a fully connected layer of 256 units (batch norm, ReLU) and the
      classifier after the stages. It has 1,008,800 parameters.

    Args:
        Same as `convnet4`, plus:
        input_shape: tuple of 3 ints, at least 8x8 pixels.
        classes: int, or `None` for features: the flattened maps of the last stage with
            `"code"`, the 256 units with `"paper"`.
        convolution: Makes the nine convolutions of the stages.
        variant: `"code"` or `"paper"`.
        plus: bool, whether to return the deeper and wider CNN++: four convolutions per
            stage, with 55, 110 and 220 filters (`"code"`; 2,054,525 parameters)
            or 51, 102 and 204 (`"paper"`; 2,551,746).
        filters: `None` for the widths above, or an int or 3 ints, the filters of the
            stages.
        batch_normalization: See `convnet4`; the default has momentum 0.99, the authors'
            layer 0.999.

    Returns:
        A `keras.Model` from images to logits of shape `(batch, classes)`, or to features.

    Raises:
        ValueError: If the images are too small, or `variant` or `filters` is invalid.

    Example:

    >>> import functools
    >>> import nsl_keras
    >>> dynamic = functools.partial(
    ...     nsl_keras.layers.NeuralSimilarityConv2D,
    ...     predictor=nsl_keras.predictors.published())
    >>> model = nsl_keras.backbones.cnn9(convolution=dynamic)
    >>> sum(variable.numpy().size for variable in model.trainable_variables)
    890946

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.1 and Table 7. The
        paper does not give the widths of CNN++; these are this package's.
    """
    variant = validation.one_of(variant, ("code", "paper"), "variant")
    wider = {"code": (55, 110, 220), "paper": (51, 102, 204)}[variant]
    plus = validation.boolean(plus, "plus")
    if filters is None:
        filters = wider if plus else (32, 64, 128)
    widths = validation.positive_integers(filters, 3, "filters")
    check_images(input_shape, 8)
    layers = Units(convolution, batch_normalization, kernel_regularizer)
    inputs = keras.Input(input_shape)
    outputs = inputs
    if variant == "code":
        outputs = layers.unit(outputs, widths[0], 3, name="root", plain=True)
    outputs = _stages(outputs, layers, widths, depth=4 if plus else 3)
    if variant == "paper":
        outputs = _fully_connected(outputs, layers, 256, classes)
    elif classes is None:
        outputs = keras.layers.Flatten()(outputs)
    else:
        left = height_and_width(outputs.shape[1:])
        outputs = layers.convolve(
            outputs, classes, left, "classifier", plain=True, padding="valid"
        )
        outputs = keras.layers.Flatten(name="logits")(outputs)
    return keras.Model(inputs, outputs, name=name)


def cnn10(
    input_shape: tuple[int, int, int] = (224, 224, 3),
    classes: int | None = 1000,
    convolution: Factory = keras.layers.Conv2D,
    plus: bool = False,
    filters: int | Sequence[int] | None = None,
    batch_normalization: Factory = BatchNormalization,
    kernel_regularizer: Any = None,
    name: str = "cnn10",
) -> keras.Model:
    """Returns the CNN-10 of Neural Similarity Learning, for ImageNet images.

    It has a 7x7 convolution of 64 filters and stride 2, 3x3 max pooling of stride 2, three
    stages of three 3x3 convolutions (64, 128 and 256 filters), each followed by 2x2 max
    pooling, a fully connected layer of 512 units and the classifier. Batch norm and ReLU
    follow all except the last.

    The counts of Table 5 (8.90 million parameters, 9.61 with dynamic DNS) imply predictors
    with 64 hidden filters, at the nine 3x3 convolutions only.

    Args:
        Same as `cnn9` without `variant`, plus:
        input_shape: tuple of 3 ints, at least 32x32 pixels.
        classes: int, or `None` for the 512 features.
        convolution: Makes the 3x3 convolutions.
        plus: bool, whether to return the deeper and wider CNN-10++: four
            convolutions per stage, with 66, 130 and 256 filters (9.71 million parameters,
            as in Table 5).

    Returns:
        Same as `cnn9`.

    Example:

    >>> import nsl_keras
    >>> model = nsl_keras.backbones.cnn10((64, 64, 3), classes=10)
    >>> model.output_shape
    (None, 10)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Tables 5 and 7. The paper
        does not give the widths of CNN-10++; these are this package's.
    """
    plus = validation.boolean(plus, "plus")
    if filters is None:
        filters = (66, 130, 256) if plus else (64, 128, 256)
    widths = validation.positive_integers(filters, 3, "filters")
    check_images(input_shape, 32)
    layers = Units(convolution, batch_normalization, kernel_regularizer)
    inputs = keras.Input(input_shape)
    outputs = layers.unit(inputs, 64, 7, name="root", plain=True, strides=2)
    pool = keras.layers.MaxPooling2D(3, strides=2, padding="same", name="root_pool")
    outputs = _stages(pool(outputs), layers, widths, depth=4 if plus else 3)
    outputs = _fully_connected(outputs, layers, 512, classes)
    return keras.Model(inputs, outputs, name=name)


def cnn4(
    input_shape: tuple[int, int, int] = (84, 84, 3),
    classes: int | None = 5,
    convolution: Factory = keras.layers.Conv2D,
    plus: bool = False,
    filters: int | None = None,
    batch_normalization: Factory = BatchNormalization,
    kernel_regularizer: Any = None,
    name: str = "cnn4",
) -> keras.Model:
    """Returns the CNN-4 of the few-shot experiments, for Mini-ImageNet.

    It has four 3x3 convolutions of 32 filters, each with batch norm, ReLU and 2x2 max
    pooling, then a dense classifier of the flattened maps: 32,773 trainable parameters for
    84x84 pixels and 5 classes. The authors have not released code for it.

    Args:
        Same as `cnn9` without `variant`, plus:
        input_shape: tuple of 3 ints, at least 16x16 pixels.
        classes: int, or `None` for the flattened features (800 for 84x84 pixels).
        convolution: Makes all convolutions.
        plus: bool, whether to return a deeper and wider network: two convolutions before
            the last pooling, and 55 filters.
        filters: `None` for the widths above, or an int, the filters of each convolution.

    Returns:
        Same as `cnn9`.

    Example:

    >>> import nsl_keras
    >>> nsl_keras.backbones.cnn4(classes=None).output_shape
    (None, 800)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.2, after Ravi and
        Larochelle (ICLR 2017). The wider network is this package's.
    """
    plus = validation.boolean(plus, "plus")
    if filters is None:
        filters = 55 if plus else 32
    width = validation.positive_integer(filters, "filters")
    check_images(input_shape, 16)
    layers = Units(convolution, batch_normalization, kernel_regularizer)
    inputs = keras.Input(input_shape)
    outputs = _stages(inputs, layers, (width,) * 3, depth=1)
    outputs = _stage(outputs, layers, width, depth=2 if plus else 1, name="stage_3")
    outputs = keras.layers.Flatten()(outputs)
    if classes is not None:
        outputs = layers.dense(outputs, classes, "classifier")
    return keras.Model(inputs, outputs, name=name)


def _stages(outputs: Tensor, layers: Units, widths: Sequence[int], depth: int) -> Tensor:
    for index, width in enumerate(widths):
        outputs = _stage(outputs, layers, width, depth, name=f"stage_{index}")
    return outputs


def _stage(outputs: Tensor, layers: Units, width: int, depth: int, name: str) -> Tensor:
    """`depth` units of 3x3 convolution, batch norm and ReLU, then 2x2 max pooling."""
    for index in range(depth):
        outputs = layers.unit(outputs, width, 3, name=f"{name}_layer_{index}")
    return keras.layers.MaxPooling2D(2, name=f"{name}_pool")(outputs)


def _fully_connected(
    outputs: Tensor, layers: Units, width: int, classes: int | None
) -> Tensor:
    """A fully connected layer with batch norm and ReLU, and the classifier if asked."""
    outputs = keras.layers.Flatten()(outputs)
    outputs = layers.dense(outputs, width, "fully_connected", use_bias=False)
    outputs = layers.activate(outputs, "fully_connected")
    if classes is None:
        return outputs
    return layers.dense(outputs, classes, "classifier", use_bias=False)
