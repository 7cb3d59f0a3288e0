"""Three networks of the papers, as functional Keras models.

`convolution=` takes a callable with the arguments of `keras.layers.Conv2D` that returns a
layer: a class, a `functools.partial`, or a function that decides by kernel size or name. It
makes the convolutions to which the papers add a similarity; all others are Keras layers.
`batch_normalization=` takes such a callable for batch norms.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.normalization import BatchNormalization
from nsl_keras.similarity.predictors import small_normal

__all__ = ["cnn4", "cnn9", "convnet4"]

Factory = Callable[..., keras.layers.Layer]

#: The batch norm of the networks of Meta-Neighborhoods.
FAST_BATCH_NORMALIZATION = functools.partial(BatchNormalization, momentum=0.9)

#: He's normal initializer, not truncated, as in the code of NSL's authors.
he_normal = functools.partial(small_normal, 1.0)


def convnet4(
    input_shape: tuple[int | None, int | None, int] = (32, 32, 3),
    filters: int | Sequence[int] = (24, 96, 192, 192),
    convolution: Factory = keras.layers.Conv2D,
    batch_normalization: Factory = FAST_BATCH_NORMALIZATION,
    name: str = "convnet4",
) -> keras.Model:
    """Returns the 4-layer ConvNet of Meta-Neighborhoods as a feature extractor.

    Four 3x3 convolutions with batch norm make features of shape `(batch, filters[-1])`.
    ReLU and 3x3 max pooling of stride 2 ("valid") follow the first two, ReLU follows the
    third, and global average pooling without a ReLU follows the last. The network has
    520,056 trainable parameters by default.

    Args:
        input_shape: tuple of 3, height, width and channels (in the order of
            `keras.config.image_data_format()`); at least 7x7 pixels.
        filters: int or 4 ints, the filters of the convolutions.
        convolution: Callable that takes the arguments of `keras.layers.Conv2D` and returns
            a layer; makes all four convolutions.
        batch_normalization: Callable that takes the arguments of
            `keras.layers.BatchNormalization` and returns a layer. The default is
            `nsl_keras.layers.BatchNormalization` with momentum 0.9.
        name: str, the model's name.

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
    check_images(input_shape, 7, any_size=True)
    layers = Units(convolution, batch_normalization, keras.initializers.GlorotUniform)
    inputs = outputs = keras.Input(input_shape)
    for index in range(2):
        outputs = layers.unit(outputs, widths[index], 3, f"layer_{index}")
        pool = keras.layers.MaxPooling2D(3, strides=2, name=f"layer_{index}_pool")
        outputs = pool(outputs)
    outputs = layers.unit(outputs, widths[2], 3, "layer_2")
    outputs = layers.convolve(outputs, widths[3], 3, "layer_3")
    outputs = layers.normalize(outputs, "layer_3")
    outputs = keras.layers.GlobalAveragePooling2D(name="pool")(outputs)
    return keras.Model(inputs, outputs, name=name)


def cnn9(
    input_shape: tuple[int, int, int] = (32, 32, 3),
    classes: int | None = 10,
    convolution: Factory = keras.layers.Conv2D,
    filters: int | Sequence[int] = (32, 64, 128),
    batch_normalization: Factory = BatchNormalization,
    name: str = "cnn9",
) -> keras.Model:
    """Returns the CNN-9 of Neural Similarity Learning, for CIFAR images.

    The network consists of a plain 3x3 convolution, three stages of three 3x3 convolutions
    (32, 64 and 128 filters), each followed by 2x2 max pooling, and a "valid" convolution
    over the remaining map, whose outputs are the logits. Batch norm and ReLU follow all
    convolutions except the last. For 10 classes it has 511,200 trainable parameters, 81
    more with a static diagonal similarity and 729 more with an unconstrained one.

    Args:
        Same as `convnet4`, plus:
        input_shape: tuple of 3 ints, at least 8x8 pixels.
        classes: int, or `None` for features, the flattened maps of the last stage.
        convolution: Makes the nine convolutions of the stages.
        filters: int or 3 ints, the filters of the stages.
        batch_normalization: As in `convnet4`, with a default momentum of 0.99 (the authors
            use 0.999).

    Example:

    >>> import nsl_keras
    >>> static = nsl_keras.layers.NeuralSimilarityConv2D
    >>> model = nsl_keras.backbones.cnn9(convolution=static)
    >>> sum(variable.numpy().size for variable in model.trainable_variables)
    511281

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.1; layout from the
        authors' code.
    """
    widths = validation.positive_integers(filters, 3, "filters")
    check_images(input_shape, 8)
    layers = Units(convolution, batch_normalization)
    inputs = keras.Input(input_shape)
    outputs = layers.unit(inputs, widths[0], 3, "root", plain=True)
    for index, width in enumerate(widths):
        outputs = layers.stage(outputs, width, 3, f"stage_{index}")
    if classes is not None:
        left = height_and_width(outputs.shape[1:])
        outputs = layers.convolve(
            outputs, classes, left, "classifier", plain=True, padding="valid"
        )
    flatten = keras.layers.Flatten(name="features" if classes is None else "logits")
    return keras.Model(inputs, flatten(outputs), name=name)


def cnn4(
    input_shape: tuple[int, int, int] = (84, 84, 3),
    classes: int | None = 5,
    convolution: Factory = keras.layers.Conv2D,
    filters: int | Sequence[int] = 32,
    batch_normalization: Factory = BatchNormalization,
    name: str = "cnn4",
) -> keras.Model:
    """Returns the CNN-4 of the few-shot experiments, for Mini-ImageNet.

    Batch norm, ReLU and 2x2 max pooling follow each of four 3x3 convolutions, and a dense
    layer computes logits from the flattened maps. The network has 32,773 trainable
    parameters for 84x84 pixels and 5 classes. The authors released no code.

    Args:
        Same as `cnn9`, plus:
        input_shape: tuple of 3 ints, at least 16x16 pixels.
        classes: int, or `None` for the flattened features (800 for 84x84 pixels).
        convolution: Makes all convolutions.
        filters: int or 4 ints, the filters of the convolutions.

    Example:

    >>> import nsl_keras
    >>> nsl_keras.backbones.cnn4(classes=None).output_shape
    (None, 800)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 7.2, after Ravi and
        Larochelle (ICLR 2017).
    """
    widths = validation.positive_integers(filters, 4, "filters")
    check_images(input_shape, 16)
    layers = Units(convolution, batch_normalization)
    inputs = outputs = keras.Input(input_shape)
    for index, width in enumerate(widths):
        outputs = layers.stage(outputs, width, 1, f"stage_{index}")
    outputs = keras.layers.Flatten()(outputs)
    if classes is not None:
        options = {"kernel_initializer": he_normal(), "name": "classifier"}
        outputs = keras.layers.Dense(classes, **options)(outputs)
    return keras.Model(inputs, outputs, name=name)


def height_and_width(shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Returns height and width from a shape without batch axis."""
    channels_first = keras.config.image_data_format() == "channels_first"
    return tuple(shape[1:] if channels_first else shape[:-1])


def check_images(input_shape: Any, least: int, any_size: bool = False) -> None:
    """Raises for images that are too small to pool."""
    sizes = height_and_width(input_shape)
    large = len(sizes) == 2 and all(any_size if s is None else s >= least for s in sizes)
    demand = f"the shape of images of at least {least}x{least} pixels"
    validation.require(large, "input_shape", demand, tuple(input_shape))


@dataclasses.dataclass(frozen=True)
class Units:
    """Makes a network's layers with their common options.

    `make_initializer` makes one initializer per kernel, because a shared one would give
    kernels of the same shape the same values.
    """

    convolution: Factory
    normalization: Factory
    make_initializer: Callable[[], keras.initializers.Initializer] = he_normal

    def convolve(
        self,
        inputs: Tensor,
        filters: int,
        kernel_size: Any,
        name: str,
        plain: bool = False,
        **options: Any,
    ) -> Tensor:
        """Returns a convolution without bias; a 1x1 convolution is always plain."""
        make = keras.layers.Conv2D if plain or kernel_size == 1 else self.convolution
        layer = make(
            filters,
            kernel_size,
            use_bias=False,
            kernel_initializer=self.make_initializer(),
            name=f"{name}_convolution",
            **{"padding": "same", **options},
        )
        return layer(inputs)

    def normalize(self, inputs: Tensor, name: str) -> Tensor:
        axis = 1 if keras.config.image_data_format() == "channels_first" else -1
        return self.normalization(axis=axis, name=f"{name}_normalization")(inputs)

    def activate(self, inputs: Tensor, name: str) -> Tensor:
        """Returns batch norm and ReLU."""
        return keras.layers.ReLU(name=f"{name}_relu")(self.normalize(inputs, name))

    def unit(
        self, inputs: Tensor, filters: int, kernel_size: int, name: str, **options: Any
    ) -> Tensor:
        """Returns convolution, batch norm and ReLU; arguments are those of `convolve`."""
        outputs = self.convolve(inputs, filters, kernel_size, name, **options)
        return self.activate(outputs, name)

    def stage(self, inputs: Tensor, filters: int, depth: int, name: str) -> Tensor:
        """Returns `depth` units of 3x3 convolutions, then 2x2 max pooling."""
        for index in range(depth):
            inputs = self.unit(inputs, filters, 3, f"{name}_layer_{index}")
        return keras.layers.MaxPooling2D(2, name=f"{name}_pool")(inputs)
