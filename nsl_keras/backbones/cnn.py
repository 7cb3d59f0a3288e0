"""Plain convolutional networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.backbones import units


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
