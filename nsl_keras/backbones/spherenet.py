"""The hyperspherical network with self-attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import keras

from nsl_keras import validation
from nsl_keras.backbones.units import (
    Factory,
    Units,
    check_images,
    height_and_width,
)
from nsl_keras.regularizers import OrthogonalityRegularizer
from nsl_keras.similarity.global_similarity import GlobalNeuralSimilarity2D
from nsl_keras.similarity.sphere import SphereConv2D
from nsl_keras.training.normalization import BatchNormalization


def self_attention_spherenet(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    classes: int | None = 10,
    filters: int | Sequence[int] = (128, 192, 256),
    attention: bool = True,
    sphere: bool = True,
    convolution: Factory | None = None,
    orthogonality: float = 0.0,
    l2: float = 0.0,
    batch_normalization: Factory = BatchNormalization,
    name: str = "self_attention_spherenet",
) -> keras.Model:
    """Returns a SphereNet with self-attention as dynamic global neural similarity.

    It has three stages of three 3x3 convolutions (128, 192 and 256 filters, batch norm,
    ReLU), each followed by 2x2 max pooling; the authors' self-attention after the first
    two; a "valid" convolution of 256 filters over the remaining map (4x4 for 32x32
    pixels), with neither batch norm nor ReLU; and a linear classifier. No layer has a
    bias. It has 3,926,274 trainable parameters for 10 classes, 3,949,314 for 100.

    The four combinations of `attention` and `sphere` are the networks of Table 8.

    Args:
        Same as `cnn9` without `variant`, `plus` and `kernel_regularizer`, plus:
        classes: int, or `None` for the features.
        filters: int or 3 ints, the filters of the stages; the last is also the number of
            features.
        attention: bool, whether there is attention.
        sphere: bool, whether convolutions, also those of the attention, compare by
            angle; `False` for plain convolutions.
        convolution: Makes the ten convolutions. `None` is `SphereConv2D` with `sphere`,
            `keras.layers.Conv2D` without.
        orthogonality: float, at least 0, the strength of an `OrthogonalityRegularizer` on
            all kernels except the classifier's; 1e-4 in the authors' code.
        l2: float, at least 0, the decay of batch norms and kernels, except the kernels of
            the default `SphereConv2D`, whose length hardly matters; 2.5e-4 in the authors'
            code, written as 5e-4 of half the squares.

    Returns:
        A `keras.Model` from images to logits of shape `(batch, classes)`, or to features.

    Raises:
        ValueError: If the images are too small, `filters` is invalid, or a strength is
            negative.

    Example:

    >>> import nsl_keras
    >>> model = nsl_keras.backbones.self_attention_spherenet()
    >>> model.output_shape
    (None, 10)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Appendix B.2 and Table 8;
        layout and start values from the authors' code.
    """
    widths = validation.positive_integers(filters, 3, "filters")
    validation.non_negative_number(orthogonality, "orthogonality")
    validation.non_negative_number(l2, "l2")
    check_images(input_shape, 8)
    decay = keras.regularizers.L2(l2) if l2 else None
    apart = OrthogonalityRegularizer(orthogonality) if orthogonality else None
    both = OrthogonalityRegularizer(orthogonality, l2) if orthogonality else decay
    by_angle = validation.boolean(sphere, "sphere") and convolution is None
    layers = Units(
        convolution or (SphereConv2D if sphere else keras.layers.Conv2D),
        functools.partial(
            batch_normalization, gamma_regularizer=decay, beta_regularizer=decay
        ),
        kernel_regularizer=apart if by_angle else both,
    )

    inputs = keras.Input(input_shape)
    outputs = inputs
    for stage, width in enumerate(widths):
        for index in range(3):
            outputs = layers.unit(outputs, width, 3, f"stage_{stage}_layer_{index}")
        outputs = keras.layers.MaxPooling2D(2, name=f"stage_{stage}_pool")(outputs)
        if validation.boolean(attention, "attention") and stage < 2:
            outputs = GlobalNeuralSimilarity2D(
                similarity="softmax_attention",
                similarity_regularizer=both,
                sphere=sphere,
                name=f"stage_{stage}_attention",
            )(outputs)
    left = height_and_width(outputs.shape[1:])
    outputs = layers.convolve(outputs, widths[-1], left, "features", padding="valid")
    outputs = keras.layers.Flatten(name="flatten")(outputs)
    if classes is not None:
        decayed = dataclasses.replace(layers, kernel_regularizer=decay)
        outputs = decayed.dense(outputs, classes, "classifier", use_bias=False)
    return keras.Model(inputs, outputs, name=name)
