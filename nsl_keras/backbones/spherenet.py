"""The hyperspherical network with self-attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity.global_similarity import GlobalNeuralSimilarity2D
from nsl_keras.similarity.predictors import small_normal
from nsl_keras.similarity.regularizers import OrthogonalityRegularizer
from nsl_keras.similarity.sphere import SphereConv2D


def self_attention_spherenet(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    classes: int | None = 10,
    filters: int | Sequence[int] = (128, 192, 256),
    attention: bool = True,
    sphere: bool = True,
    orthogonality: float = 0.0,
    l2: float = 0.0,
    batch_normalization_momentum: float = 0.99,
    batch_normalization_epsilon: float = 1e-3,
    synchronized: bool = False,
    name: str = "self_attention_spherenet",
) -> keras.Model:
    """Returns a SphereNet with self-attention as dynamic global neural similarity.

    Three stages of three 3x3 convolutions (128, 192 and 256 filters, batch norm, ReLU),
    each with 2x2 max pooling behind it; the authors' self-attention behind the first two;
    a "valid" convolution of 256 filters over all that the stages leave (4x4 for 32x32
    pixels), with neither batch norm nor ReLU; and a linear classifier. No layer has a
    bias. All convolutions but the classifier are SphereConvs, the first one included.
    3,926,274 trainable parameters for 10 classes, 3,949,314 for 100.

    The four networks of the paper's Table 8 are `attention` and `sphere`, each on or off.

    Args:
        input_shape: tuple of 3 ints, height, width and channels (in the order of
            `keras.config.image_data_format()`); at least 8x8 pixels.
        classes: int, or `None` for the 256 features in front of the classifier.
        filters: int or 3 ints, the filters of the stages; the last is also the number of
            features.
        attention: bool, whether the attention is there.
        sphere: bool, whether convolutions compare by angle, those of the attention
            included; `False` for plain convolutions.
        orthogonality: float, at least 0, the strength of an `OrthogonalityRegularizer` on
            all kernels but the classifier's. The authors take 1e-4.
        l2: float, at least 0, the decay of the kernels of attention and classifier, of
            the scales and shifts of the batch norms, and with `sphere=False` of all
            kernels (the length of a SphereConv's hardly matters). The authors' value is
            2.5e-4, which they write 5e-4 for half the squares.
        batch_normalization_momentum: float in [0, 1). The authors take 0.999, with moving
            statistics that need thousands of steps.
        batch_normalization_epsilon: float above 0.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy. Unsynchronised replicas drift apart.
        name: str, the model's name.

    Returns:
        A functional `keras.Model` from images to logits of shape `(batch, classes)`, or
        to features.

    Raises:
        ValueError: For arguments outside the ranges above.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> model = nsl_keras.backbones.self_attention_spherenet()
    >>> sum(int(keras.ops.size(v)) for v in model.trainable_variables)
    3926274
    >>> model.output_shape
    (None, 10)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Appendix B.2 and Table 8;
        layout and start values from the authors' code.
    """
    widths = validation.positive_integers(filters, 3, "filters")
    validation.fraction(batch_normalization_momentum, "batch_normalization_momentum")
    validation.positive_number(batch_normalization_epsilon, "batch_normalization_epsilon")
    validation.non_negative_number(orthogonality, "orthogonality")
    validation.non_negative_number(l2, "l2")
    channels_first = keras.config.image_data_format() == "channels_first"
    sizes = tuple(input_shape[1:] if channels_first else input_shape[:-1])
    if any(size is None or size < 8 for size in sizes):
        raise ValueError(
            "`input_shape` must be of known size, at least 8x8 pixels. "
            f"Received: input_shape={tuple(input_shape)}"
        )

    decay = keras.regularizers.L2(l2) if l2 else None
    apart = OrthogonalityRegularizer(orthogonality) if orthogonality else None
    both = OrthogonalityRegularizer(orthogonality, l2) if orthogonality else decay

    def convolve(inputs: Tensor, width: int, size: Any, name: str, padding: str) -> Tensor:
        convolution = SphereConv2D if sphere else keras.layers.Conv2D
        return convolution(
            width,
            size,
            padding=padding,
            use_bias=False,
            kernel_initializer=small_normal(1.0),
            kernel_regularizer=apart if sphere else both,
            name=name,
        )(inputs)

    inputs = keras.Input(input_shape)
    outputs = inputs
    for stage, width in enumerate(widths):
        for index in range(3):
            at = f"stage_{stage}_layer_{index}"
            outputs = convolve(outputs, width, 3, f"{at}_convolution", "same")
            outputs = keras.layers.BatchNormalization(
                axis=1 if channels_first else -1,
                momentum=batch_normalization_momentum,
                epsilon=batch_normalization_epsilon,
                gamma_regularizer=decay,
                beta_regularizer=decay,
                synchronized=synchronized,
                name=f"{at}_normalization",
            )(outputs)
            outputs = keras.layers.ReLU(name=f"{at}_relu")(outputs)
        outputs = keras.layers.MaxPooling2D(2, name=f"stage_{stage}_pool")(outputs)
        if attention and stage < 2:
            outputs = GlobalNeuralSimilarity2D(
                similarity="softmax_attention",
                similarity_regularizer=both,
                sphere=sphere,
                name=f"stage_{stage}_attention",
            )(outputs)
    left = tuple(size // 8 for size in sizes)
    outputs = convolve(outputs, widths[-1], left, "features", "valid")
    outputs = keras.layers.Flatten(name="flatten")(outputs)
    if classes is not None:
        outputs = keras.layers.Dense(
            validation.positive_integer(classes, "classes"),
            use_bias=False,
            kernel_initializer=small_normal(1.0),
            kernel_regularizer=decay,
            name="classifier",
        )(outputs)
    return keras.Model(inputs, outputs, name=name)
