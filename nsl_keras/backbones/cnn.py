"""Plain convolutional networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.backbones.units import (
    Convolution,
    Normalization,
    Units,
    check_classes,
    check_images,
    height_and_width,
)
from nsl_keras.backend import Tensor
from nsl_keras.training.normalization import BatchNormalization


def convnet4(
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    filters: int | Sequence[int] = (24, 96, 192, 192),
    convolution: Convolution = keras.layers.Conv2D,
    batch_normalization: Normalization = BatchNormalization,
    batch_normalization_momentum: float = 0.9,
    synchronized: bool = False,
    kernel_regularizer: Any = None,
    name: str = "convnet4",
) -> keras.Model:
    """Returns the 4-layer ConvNet of Meta-Neighborhoods as a feature extractor.

    Four times 3x3 convolution and batch norm; ReLU and 3x3 max pooling of stride 2
    ("valid") after the first two, ReLU after the third, and global average pooling
    without a ReLU at the end. With the default filters and 3 input channels it has
    520,056 trainable parameters and 192 features.

    Args:
        input_shape: tuple of 3, height, width and channels (in the order of
            `keras.config.image_data_format()`); at least 7x7 pixels.
        filters: int or 4 ints, the filters of the convolutions.
        convolution: Callable that takes the arguments of `keras.layers.Conv2D` and returns
            a layer; makes all four convolutions.
        batch_normalization: Callable that takes the arguments of
            `keras.layers.BatchNormalization` and returns a layer. The moving statistics of
            the default are unbiased from the first step on; with
            `keras.layers.BatchNormalization` they are the authors'.
        batch_normalization_momentum: float in [0, 1).
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy. Unsynchronized replicas drift apart.
        kernel_regularizer: Regularizer of the convolutions' kernels.
        name: str, the model's name.

    Returns:
        A functional `keras.Model` from images to features of shape `(batch,
        filters[-1])`.

    Raises:
        ValueError: For arguments outside the ranges above.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> model = nsl_keras.backbones.convnet4((32, 32, 3))
    >>> sum(int(keras.ops.size(v)) for v in model.trainable_variables)
    520056
    >>> model.output_shape
    (None, 192)

    With iFiLM after each batch norm:

    >>> model = nsl_keras.convert.add_film(model, dictionary_size=10)
    >>> sum(int(keras.ops.size(v)) for v in model.trainable_variables)
    535180

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 4.2 ("4-layer ConvNet");
        widths and pooling from the authors' code ("shallownet").
    """
    widths = validation.positive_integers(filters, 4, "filters")
    check_images(input_shape, 7)
    layers = Units(
        convolution,
        batch_normalization,
        batch_normalization_momentum,
        synchronized,
        kernel_regularizer,
        make_initializer=keras.initializers.GlorotUniform,
    )
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
    convolution: Convolution = keras.layers.Conv2D,
    variant: str = "code",
    plus: bool = False,
    filters: int | Sequence[int] | None = None,
    batch_normalization: Normalization = BatchNormalization,
    batch_normalization_momentum: float = 0.99,
    batch_normalization_epsilon: float = 1e-3,
    synchronized: bool = False,
    kernel_regularizer: Any = None,
    name: str = "cnn9",
) -> keras.Model:
    """Returns the CNN-9 of Neural Similarity Learning, for CIFAR images.

    Three stages of three 3x3 convolutions (32, 64 and 128 filters, batch norm, ReLU),
    each followed by 2x2 max pooling. The authors' code and the paper differ in the rest:

    * `variant="code"`: a plain 3x3 convolution of 32 filters before the stages, with
      batch norm and ReLU, and as classifier a "valid" convolution over all that the
      stages leave (4x4 for 32x32 pixels). The nine convolutions of the stages may have a
      similarity. 511,200 trainable parameters for 10 classes; static DNS 511,281, static
      UNS 511,929, and with the authors' predictors (`nsl_keras.predictors.published`)
      dynamic DNS 890,946, dynamic UNS 2,014,560.
    * `variant="paper"`: nothing before the stages, and after them a fully connected
      layer of 256 units (batch norm, ReLU) and the classifier. All nine convolutions may
      have a similarity. 1,008,800 parameters for 10 classes.

    Args:
        input_shape: tuple of 3 ints, height, width and channels (in the order of
            `keras.config.image_data_format()`); at least 8x8 pixels.
        classes: int, or `None` for features: the flattened maps of the last stage with
            `"code"`, the 256 units with `"paper"`.
        convolution: Callable that takes the arguments of `keras.layers.Conv2D` and returns
            a layer; makes the nine convolutions that may have the similarity.
        variant: `"code"` or `"paper"`, see above. The default is the network that the
            authors' published scripts train, which their published numbers of
            parameters and the tests of this package refer to.
        plus: bool, whether to return the deeper and wider CNN++ instead: four
            convolutions a stage and 55, 110 and 220 filters (`"code"`; 2,054,525
            parameters) or 51, 102 and 204 (`"paper"`; 2,551,746), the least widths with
            more parameters than dynamic UNS has, for 10 classes.
        filters: `None` for the widths above, or an int or 3 ints, the filters of the
            stages.
        batch_normalization: Callable that takes the arguments of
            `keras.layers.BatchNormalization` and returns a layer. The moving statistics of
            the default are unbiased from the first step on; with
            `keras.layers.BatchNormalization` they are the authors'.
        batch_normalization_momentum: float in [0, 1). The authors take 0.999, with moving
            statistics that need thousands of steps.
        batch_normalization_epsilon: float above 0.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy. Unsynchronized replicas drift apart.
        kernel_regularizer: Regularizer of the kernels.
        name: str, the model's name.

    Returns:
        A functional `keras.Model` from images to logits of shape `(batch, classes)`, or
        to features.

    Raises:
        ValueError: For arguments outside the ranges above.

    Example:

    >>> import functools
    >>> import keras
    >>> import nsl_keras
    >>> static = functools.partial(
    ...     nsl_keras.layers.NeuralSimilarityConv2D, similarity="diagonal")
    >>> model = nsl_keras.backbones.cnn9(convolution=static)
    >>> sum(int(keras.ops.size(v)) for v in model.trainable_variables)
    511281
    >>> model.output_shape
    (None, 10)

    With dynamic similarities, here with the predictors of the authors:

    >>> dynamic = functools.partial(
    ...     nsl_keras.layers.NeuralSimilarityConv2D,
    ...     predictor=nsl_keras.predictors.published())
    >>> model = nsl_keras.backbones.cnn9(convolution=dynamic)
    >>> sum(int(keras.ops.size(v)) for v in model.trainable_variables)
    890946

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.1 and Table 7.
        The paper names CNN++ "deeper and wider such that the number of parameters is
        slightly larger than all variants of NSN" and describes it no further; the one
        here is this package's own.
    """
    variant = validation.one_of(variant, ("code", "paper"), "variant")
    wider = {"code": (55, 110, 220), "paper": (51, 102, 204)}
    default = wider[variant] if validation.boolean(plus, "plus") else (32, 64, 128)
    widths = validation.positive_integers(
        default if filters is None else filters, 3, "filters"
    )
    check_images(input_shape, 8, known=True)
    check_classes(classes)
    layers = Units(
        convolution,
        batch_normalization,
        batch_normalization_momentum,
        synchronized,
        kernel_regularizer,
        batch_normalization_epsilon,
    )
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
    convolution: Convolution = keras.layers.Conv2D,
    plus: bool = False,
    filters: int | Sequence[int] | None = None,
    batch_normalization: Normalization = BatchNormalization,
    batch_normalization_momentum: float = 0.99,
    batch_normalization_epsilon: float = 1e-3,
    synchronized: bool = False,
    kernel_regularizer: Any = None,
    name: str = "cnn10",
) -> keras.Model:
    """Returns the CNN-10 of Neural Similarity Learning, for ImageNet images.

    A 7x7 convolution of 64 filters and stride 2, 3x3 max pooling of stride 2, three
    stages of three 3x3 convolutions (64, 128 and 256 filters), each followed by 2x2 max
    pooling, a fully connected layer of 512 units and the classifier; batch norm and ReLU
    after all but the last.

    The paper's numbers of parameters say where the similarity is: 8.90 million for the
    plain network, and 9.61 million for dynamic DNS (Table 5), come out with predictors of
    64 hidden filters at the nine 3x3 convolutions, and none at the 7x7 one. The 32 hidden
    filters of Appendix A give 9.26 million (9.25 million of them in kernels).

    Args:
        input_shape: tuple of 3 ints, height, width and channels (in the order of
            `keras.config.image_data_format()`); at least 32x32 pixels.
        classes: int, or `None` for the 512 features.
        convolution: Callable that takes the arguments of `keras.layers.Conv2D` and returns
            a layer; makes the 3x3 convolutions.
        plus: bool, whether to return the deeper and wider CNN-10++ instead: four
            convolutions a stage and 66, 130 and 256 filters, which have the 9.71 million
            parameters of Table 5.
        filters: `None` for the widths above, or an int or 3 ints, the filters of the
            stages.
        batch_normalization: Callable that takes the arguments of
            `keras.layers.BatchNormalization` and returns a layer. The moving statistics of
            the default are unbiased from the first step on; with
            `keras.layers.BatchNormalization` they are the authors'.
        batch_normalization_momentum: float in [0, 1).
        batch_normalization_epsilon: float above 0.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy. Unsynchronized replicas drift apart.
        kernel_regularizer: Regularizer of the kernels.
        name: str, the model's name.

    Returns:
        A functional `keras.Model` from images to logits of shape `(batch, classes)`, or
        to features of shape `(batch, 512)`.

    Raises:
        ValueError: For arguments outside the ranges above.

    Example:

    >>> import nsl_keras
    >>> model = nsl_keras.backbones.cnn10((64, 64, 3), classes=10)
    >>> model.output_shape
    (None, 10)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Tables 5 and 7. The paper
        says of CNN++ that it is "deeper and wider", and its number of parameters; the
        one here is this package's own.
    """
    default = (66, 130, 256) if validation.boolean(plus, "plus") else (64, 128, 256)
    widths = validation.positive_integers(
        default if filters is None else filters, 3, "filters"
    )
    check_images(input_shape, 32, known=True)
    check_classes(classes)
    layers = Units(
        convolution,
        batch_normalization,
        batch_normalization_momentum,
        synchronized,
        kernel_regularizer,
        batch_normalization_epsilon,
    )
    inputs = keras.Input(input_shape)
    outputs = layers.unit(inputs, 64, 7, name="root", plain=True, strides=2)
    outputs = keras.layers.MaxPooling2D(3, strides=2, padding="same", name="root_pool")(
        outputs
    )
    outputs = _stages(outputs, layers, widths, depth=4 if plus else 3)
    outputs = _fully_connected(outputs, layers, 512, classes)
    return keras.Model(inputs, outputs, name=name)


def cnn4(
    input_shape: tuple[int, int, int] = (84, 84, 3),
    classes: int | None = 5,
    convolution: Convolution = keras.layers.Conv2D,
    plus: bool = False,
    filters: int | None = None,
    batch_normalization: Normalization = BatchNormalization,
    batch_normalization_momentum: float = 0.99,
    batch_normalization_epsilon: float = 1e-3,
    synchronized: bool = False,
    kernel_regularizer: Any = None,
    name: str = "cnn4",
) -> keras.Model:
    """Returns the CNN-4 of the few-shot experiments, for Mini-ImageNet.

    Four times 3x3 convolution of 32 filters, batch norm, ReLU and 2x2 max pooling, then a
    dense classifier of the flattened maps: 32,773 trainable parameters for 84x84 pixels
    and 5 classes. All four convolutions may have a similarity.

    Args:
        input_shape: tuple of 3 ints, height, width and channels (in the order of
            `keras.config.image_data_format()`); at least 16x16 pixels.
        classes: int, or `None` for the flattened features (800 for 84x84 pixels).
        convolution: Callable that takes the arguments of `keras.layers.Conv2D` and returns
            a layer; makes all convolutions.
        plus: bool, whether to return a deeper and wider network instead: two convolutions
            before the last pooling, and 55 filters, the least width of that depth with
            more parameters in its convolutions than the dynamic DNS of the default width.
        filters: `None` for the widths above, or an int, the filters of each convolution.
        batch_normalization: Callable that takes the arguments of
            `keras.layers.BatchNormalization` and returns a layer. The moving statistics of
            the default are unbiased from the first step on; with
            `keras.layers.BatchNormalization` they are the authors'.
        batch_normalization_momentum: float in [0, 1).
        batch_normalization_epsilon: float above 0.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy. Unsynchronized replicas drift apart.
        kernel_regularizer: Regularizer of the kernels.
        name: str, the model's name.

    Returns:
        A functional `keras.Model` from images to logits of shape `(batch, classes)`, or
        to features.

    Raises:
        ValueError: For arguments outside the ranges above.

    Example:

    >>> import nsl_keras
    >>> nsl_keras.backbones.cnn4(classes=None).output_shape
    (None, 800)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.2, after
        Optimization as a Model for Few-Shot Learning (Ravi and Larochelle, ICLR 2017).
        The wider network is this package's own.
    """
    default = 55 if validation.boolean(plus, "plus") else 32
    width = validation.positive_integer(default if filters is None else filters, "filters")
    check_images(input_shape, 16, known=True)
    check_classes(classes)
    layers = Units(
        convolution,
        batch_normalization,
        batch_normalization_momentum,
        synchronized,
        kernel_regularizer,
        batch_normalization_epsilon,
    )
    inputs = keras.Input(input_shape)
    outputs = _stages(inputs, layers, (width,) * 3, depth=1)
    outputs = _stage(outputs, layers, width, depth=2 if plus else 1, name="stage_3")
    outputs = keras.layers.Flatten()(outputs)
    if classes is not None:
        outputs = layers.dense(outputs, classes, "classifier", use_bias=True)
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
