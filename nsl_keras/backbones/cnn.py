"""Plain convolutional networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.backbones import units
from nsl_keras.backend import Tensor


def convnet4(
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    filters: Sequence[int] = (24, 96, 192, 192),
    similarity: Any = None,
    predictor: str | None = None,
    film: int | None = None,
    batch_normalization_momentum: float = 0.9,
    synchronized: bool = False,
    kernel_regularizer: Any = None,
    name: str = "convnet4",
) -> keras.Model:
    """Returns the 4-layer ConvNet of Meta-Neighborhoods as a feature extractor.

    Four times 3x3 convolution and batch norm; ReLU and 3x3 max pooling of stride 2
    ("valid") behind the first two, ReLU behind the third, and global average pooling
    without a ReLU at the end. With the default filters and 3 input channels it has
    520,056 trainable parameters and 192 features.

    Args:
        input_shape: tuple of 3, height, width and channels (in the order of
            `keras.config.image_data_format()`); at least 7x7 pixels.
        filters: 4 ints, the filters of the convolutions.
        similarity: `None` for plain convolutions, or the `similarity` of
            `NeuralSimilarityConv2D`.
        predictor: `None` for a static similarity, or the name of a predictor of
            `NeuralSimilarityConv2D`; each layer has its own.
        film: int or `None`, the dictionary size of an iFiLM behind each batch norm.
        batch_normalization_momentum: float in [0, 1), predictors' batch norms included.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy. Unsynchronised replicas drift apart.
        kernel_regularizer: Regularizer of the convolutions' kernels.
        name: str, the model's name.

    Returns:
        A functional `keras.Model` from images to features of shape `(batch,
        filters[-1])`.

    Raises:
        ValueError: If `filters` are not 4 positive ints, or the images are too small.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> model = nsl_keras.backbones.convnet4((32, 32, 3))
    >>> sum(int(keras.ops.size(v)) for v in model.trainable_variables)
    520056
    >>> model.output_shape
    (None, 192)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 4.2 ("4-layer ConvNet");
        widths and pooling from the authors' code ("shallownet").
    """
    if isinstance(filters, int):
        raise ValueError(
            f"`filters` must be 4 positive integers. Received: filters={filters}"
        )
    filters = validation.positive_integers(tuple(filters), 4, "filters")
    first = keras.config.image_data_format() == "channels_first"
    for size in input_shape[1:] if first else input_shape[:-1]:
        if size is not None and size < 7:
            raise ValueError(
                "`input_shape` must be at least 7x7 pixels. "
                f"Received: input_shape={tuple(input_shape)}"
            )
    inputs = keras.Input(input_shape)
    outputs = inputs
    for index, width in enumerate(filters):
        outputs = units.convolution(
            width,
            3,
            similarity=similarity,
            predictor=predictor,
            momentum=batch_normalization_momentum,
            synchronized=synchronized,
            kernel_regularizer=kernel_regularizer,
            name=f"convolution_{index}",
        )(outputs)
        outputs = units.normalize(
            outputs,
            momentum=batch_normalization_momentum,
            synchronized=synchronized,
            film=film,
            name=f"convolution_{index}",
        )
        if index < 3:
            outputs = keras.layers.ReLU()(outputs)
        if index < 2:
            outputs = keras.layers.MaxPooling2D(3, strides=2)(outputs)
    return keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(outputs), name=name)


def cnn9(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    classes: int | None = 10,
    similarity: Any = None,
    predictor: Any = None,
    variant: str = "code",
    plus: bool = False,
    filters: Sequence[int] | None = None,
    similarity_initializer: Any = "identity",
    similarity_regularizer: Any = None,
    learn_shape: bool = False,
    predictor_filters: int | None = None,
    batch_normalization_momentum: float = 0.99,
    batch_normalization_epsilon: float = 1e-3,
    synchronized: bool = False,
    kernel_regularizer: Any = None,
    name: str = "cnn9",
) -> keras.Model:
    """Returns the CNN-9 of Neural Similarity Learning, for CIFAR images.

    Three stages of three 3x3 convolutions (32, 64 and 128 filters, batch norm, ReLU),
    each with 2x2 max pooling behind it. The authors' code and the paper differ in the
    rest:

    * `variant="code"`: a plain 3x3 convolution of 32 filters before the stages, with
      batch norm and ReLU, and as classifier a "valid" convolution over all that the
      stages leave (4x4 for 32x32 pixels). The nine convolutions of the stages have the
      similarity. 511,200 trainable parameters for 10 classes; static DNS 511,281, static
      UNS 511,929, dynamic DNS 890,946, dynamic UNS 2,014,560.
    * `variant="paper"`: nothing before the stages, and behind them a fully connected
      layer of 256 units (batch norm, ReLU) and the classifier. All nine convolutions have
      the similarity. 1,008,800 parameters for 10 classes.

    Args:
        input_shape: tuple of 3 ints, height, width and channels (in the order of
            `keras.config.image_data_format()`); at least 8x8 pixels.
        classes: int, or `None` for features: the flattened maps of the last stage with
            `"code"`, the 256 units with `"paper"`.
        similarity: `None` for plain convolutions, or the `similarity` of
            `NeuralSimilarityConv2D`.
        predictor: `None` for a static similarity; the name of a predictor of
            `NeuralSimilarityConv2D`, of which each layer gets its own; or one
            `SharedSimilarityPredictor` for all layers.
        variant: `"code"` or `"paper"`, see above. The default is the network that the
            authors' published scripts train, which their published numbers of
            parameters and the tests of this package refer to.
        plus: bool, whether to return the deeper and wider CNN++ instead: four
            convolutions a stage and 55, 110 and 220 filters (`"code"`; 2,054,525
            parameters) or 51, 102 and 204 (`"paper"`; 2,551,746), the least widths with
            more parameters than dynamic UNS has, for 10 classes.
        filters: `None` for the widths above, or 3 ints, the filters of the stages.
        similarity_initializer: Initializer of the static `M`. The authors start static
            DNS from the diagonal `[1, 0, 0, 0, 1, 0, 0, 0, 1]`, the paper from the
            identity.
        similarity_regularizer: Regularizer of the static similarity's parameters.
        learn_shape: bool, whether to learn the kernels' shapes with the similarity.
        predictor_filters: int or `None`, the hidden filters of predictors given by name;
            `None` is the authors' 64 for the diagonal similarity and 128 for others.
        batch_normalization_momentum: float in [0, 1), predictors' batch norms included.
            The authors take 0.999, with moving statistics that need thousands of steps.
        batch_normalization_epsilon: float above 0, predictors' batch norms included.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy. Unsynchronised replicas drift apart.
        kernel_regularizer: Regularizer of the kernels, predictors' included.
        name: str, the model's name.

    Returns:
        A functional `keras.Model` from images to logits of shape `(batch, classes)`, or
        to features.

    Raises:
        ValueError: For arguments outside the ranges above; for arguments of a similarity
            without one.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> model = nsl_keras.backbones.cnn9(similarity="diagonal")
    >>> sum(int(keras.ops.size(v)) for v in model.trainable_variables)
    511281
    >>> model.output_shape
    (None, 10)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.1 and Table 7.
        The paper names CNN++ "deeper and wider such that the number of parameters is
        slightly larger than all variants of NSN" and describes it no further; the one
        here is this package's own.
    """
    variant = validation.one_of(variant, ("code", "paper"), "variant")
    wider = {"code": (55, 110, 220), "paper": (51, 102, 204)}
    widths = _widths(filters, wider[variant] if plus else (32, 64, 128))
    _check_images(input_shape, 8)
    layers = units.NeuralSimilarityUnits(
        similarity=similarity,
        similarity_initializer=similarity_initializer,
        similarity_regularizer=similarity_regularizer,
        predictor=predictor,
        predictor_filters=predictor_filters,
        learn_shape=learn_shape,
        momentum=batch_normalization_momentum,
        epsilon=batch_normalization_epsilon,
        synchronized=synchronized,
        kernel_regularizer=kernel_regularizer,
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
        channels_first = keras.config.image_data_format() == "channels_first"
        size = outputs.shape[2:] if channels_first else outputs.shape[1:-1]
        outputs = layers.convolve(
            outputs, classes, size, name="classifier", plain=True, padding="valid"
        )
        outputs = keras.layers.Flatten(name="logits")(outputs)
    return keras.Model(inputs, outputs, name=name)


def cnn10(
    input_shape: tuple[int, int, int] = (224, 224, 3),
    classes: int | None = 1000,
    similarity: Any = None,
    predictor: Any = None,
    plus: bool = False,
    filters: Sequence[int] | None = None,
    similarity_initializer: Any = "identity",
    similarity_regularizer: Any = None,
    learn_shape: bool = False,
    predictor_filters: int | None = None,
    batch_normalization_momentum: float = 0.99,
    batch_normalization_epsilon: float = 1e-3,
    synchronized: bool = False,
    kernel_regularizer: Any = None,
    name: str = "cnn10",
) -> keras.Model:
    """Returns the CNN-10 of Neural Similarity Learning, for ImageNet images.

    A 7x7 convolution of 64 filters and stride 2, 3x3 max pooling of stride 2, three
    stages of three 3x3 convolutions (64, 128 and 256 filters) with 2x2 max pooling behind
    each, a fully connected layer of 512 units and the classifier; batch norm and ReLU
    behind all but the last.

    The paper's numbers of parameters say where the similarity is: 8.90 million for the
    plain network, and 9.61 million for dynamic DNS (Table 5), come out with predictors of
    64 hidden filters at the nine 3x3 convolutions, and none at the 7x7 one. The 32 hidden
    filters of Appendix A give 9.26 million (9.25 million of them in kernels).

    Args:
        input_shape: tuple of 3 ints, height, width and channels (in the order of
            `keras.config.image_data_format()`); at least 32x32 pixels.
        classes: int, or `None` for the 512 features.
        similarity: `None` for plain convolutions, or the `similarity` of
            `NeuralSimilarityConv2D`, for the 3x3 convolutions.
        predictor: `None` for a static similarity; the name of a predictor of
            `NeuralSimilarityConv2D`, of which each layer gets its own; or one
            `SharedSimilarityPredictor` for all layers.
        plus: bool, whether to return the deeper and wider CNN-10++ instead: four
            convolutions a stage and 66, 130 and 256 filters, which have the 9.71 million
            parameters of Table 5.
        filters: `None` for the widths above, or 3 ints, the filters of the stages.
        similarity_initializer: Initializer of the static `M`.
        similarity_regularizer: Regularizer of the static similarity's parameters.
        learn_shape: bool, whether to learn the kernels' shapes with the similarity.
        predictor_filters: int or `None`, the hidden filters of predictors given by name;
            `None` is 64 for the diagonal similarity and 128 for others.
        batch_normalization_momentum: float in [0, 1), predictors' batch norms included.
        batch_normalization_epsilon: float above 0, predictors' batch norms included.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy. Unsynchronised replicas drift apart.
        kernel_regularizer: Regularizer of the kernels, predictors' included.
        name: str, the model's name.

    Returns:
        A functional `keras.Model` from images to logits of shape `(batch, classes)`, or
        to features of shape `(batch, 512)`.

    Raises:
        ValueError: For arguments outside the ranges above; for arguments of a similarity
            without one.

    Example:

    >>> import nsl_keras
    >>> model = nsl_keras.backbones.cnn10((64, 64, 3), classes=10, similarity="diagonal")
    >>> model.output_shape
    (None, 10)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Tables 5 and 7. The paper
        says of CNN++ that it is "deeper and wider", and its number of parameters; the
        one here is this package's own.
    """
    widths = _widths(filters, (66, 130, 256) if plus else (64, 128, 256))
    _check_images(input_shape, 32)
    layers = units.NeuralSimilarityUnits(
        similarity=similarity,
        similarity_initializer=similarity_initializer,
        similarity_regularizer=similarity_regularizer,
        predictor=predictor,
        predictor_filters=predictor_filters,
        learn_shape=learn_shape,
        momentum=batch_normalization_momentum,
        epsilon=batch_normalization_epsilon,
        synchronized=synchronized,
        kernel_regularizer=kernel_regularizer,
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
    similarity: Any = None,
    predictor: Any = None,
    plus: bool = False,
    filters: int | None = None,
    similarity_initializer: Any = "identity",
    similarity_regularizer: Any = None,
    learn_shape: bool = False,
    predictor_filters: int | None = None,
    batch_normalization_momentum: float = 0.99,
    batch_normalization_epsilon: float = 1e-3,
    synchronized: bool = False,
    kernel_regularizer: Any = None,
    name: str = "cnn4",
) -> keras.Model:
    """Returns the CNN-4 of the few-shot experiments, for Mini-ImageNet.

    Four times 3x3 convolution of 32 filters, batch norm, ReLU and 2x2 max pooling, then a
    dense classifier of the flattened maps: 32,773 trainable parameters for 84x84 pixels
    and 5 classes. All four convolutions have the similarity.

    Args:
        input_shape: tuple of 3 ints, height, width and channels (in the order of
            `keras.config.image_data_format()`); at least 16x16 pixels.
        classes: int, or `None` for the flattened features (800 for 84x84 pixels).
        similarity: `None` for plain convolutions, or the `similarity` of
            `NeuralSimilarityConv2D`.
        predictor: `None` for a static similarity; the name of a predictor of
            `NeuralSimilarityConv2D`, of which each layer gets its own; or one
            `SharedSimilarityPredictor` for all layers.
        plus: bool, whether to return a deeper and wider network instead: two convolutions
            before the last pooling, and 55 filters, the least width of that depth with
            more parameters in its convolutions than the dynamic DNS of the default width.
        filters: `None` for the widths above, or an int, the filters of each convolution.
        similarity_initializer: Initializer of the static `M`.
        similarity_regularizer: Regularizer of the static similarity's parameters.
        learn_shape: bool, whether to learn the kernels' shapes with the similarity.
        predictor_filters: int or `None`, the hidden filters of predictors given by name;
            `None` is 64 for the diagonal similarity and 128 for others.
        batch_normalization_momentum: float in [0, 1), predictors' batch norms included.
        batch_normalization_epsilon: float above 0, predictors' batch norms included.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy. Unsynchronised replicas drift apart.
        kernel_regularizer: Regularizer of the kernels, predictors' included.
        name: str, the model's name.

    Returns:
        A functional `keras.Model` from images to logits of shape `(batch, classes)`, or
        to features.

    Raises:
        ValueError: For arguments outside the ranges above; for arguments of a similarity
            without one.

    Example:

    >>> import nsl_keras
    >>> nsl_keras.backbones.cnn4(classes=None, similarity="diagonal").output_shape
    (None, 800)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.2, after
        Optimization as a Model for Few-Shot Learning (Ravi and Larochelle, ICLR 2017).
        The wider network is this package's own.
    """
    width = validation.positive_integer(filters or (55 if plus else 32), "filters")
    _check_images(input_shape, 16)
    layers = units.NeuralSimilarityUnits(
        similarity=similarity,
        similarity_initializer=similarity_initializer,
        similarity_regularizer=similarity_regularizer,
        predictor=predictor,
        predictor_filters=predictor_filters,
        learn_shape=learn_shape,
        momentum=batch_normalization_momentum,
        epsilon=batch_normalization_epsilon,
        synchronized=synchronized,
        kernel_regularizer=kernel_regularizer,
    )
    inputs = keras.Input(input_shape)
    outputs = _stages(inputs, layers, (width,) * 3, depth=1)
    outputs = _stage(outputs, layers, width, depth=2 if plus else 1, name="stage_3")
    outputs = keras.layers.Flatten()(outputs)
    if classes is not None:
        outputs = layers.dense(outputs, classes, name="classifier", use_bias=True)
    return keras.Model(inputs, outputs, name=name)


def _widths(filters: Any, default: tuple[int, ...]) -> tuple[int, ...]:
    if filters is None:
        return default
    if isinstance(filters, int):
        raise ValueError(
            f"`filters` must be {len(default)} positive integers. "
            f"Received: filters={filters}"
        )
    return validation.positive_integers(tuple(filters), len(default), "filters")


def _check_images(input_shape: tuple[int | None, ...], least: int) -> None:
    """Raises unless height and width are known and at least so large."""
    first = keras.config.image_data_format() == "channels_first"
    for size in input_shape[1:] if first else input_shape[:-1]:
        if size is None or size < least:
            raise ValueError(
                f"`input_shape` must be of known size, at least {least}x{least} pixels. "
                f"Received: input_shape={tuple(input_shape)}"
            )


def _stages(
    outputs: Tensor,
    layers: units.NeuralSimilarityUnits,
    widths: Sequence[int],
    depth: int,
) -> Tensor:
    for index, width in enumerate(widths):
        outputs = _stage(outputs, layers, width, depth, name=f"stage_{index}")
    return outputs


def _stage(
    outputs: Tensor,
    layers: units.NeuralSimilarityUnits,
    width: int,
    depth: int,
    name: str,
) -> Tensor:
    """`depth` units of 3x3 convolution, batch norm and ReLU, then 2x2 max pooling."""
    for index in range(depth):
        outputs = layers.unit(outputs, width, 3, name=f"{name}_layer_{index}")
    return keras.layers.MaxPooling2D(2, name=f"{name}_pool")(outputs)


def _fully_connected(
    outputs: Tensor, layers: units.NeuralSimilarityUnits, width: int, classes: int | None
) -> Tensor:
    """A fully connected layer with batch norm and ReLU, and the classifier if asked."""
    outputs = keras.layers.Flatten()(outputs)
    outputs = layers.dense(outputs, width, name="fully_connected")
    outputs = layers.normalize(outputs, "fully_connected")
    outputs = keras.layers.ReLU(name="fully_connected_relu")(outputs)
    if classes is None:
        return outputs
    return layers.dense(outputs, classes, name="classifier")
