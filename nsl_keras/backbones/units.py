"""The parts of backbones: convolutions, batch norms, stages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras

from nsl_keras.backend import Tensor
from nsl_keras.training.normalization import BatchNormalization

#: Called with the arguments of a Keras layer; returns a layer.
Factory = Callable[..., keras.layers.Layer]

#: The batch norm of the networks of Meta-Neighborhoods.
FAST_BATCH_NORMALIZATION = functools.partial(BatchNormalization, momentum=0.9)


def he_normal() -> keras.initializers.Initializer:
    """Returns He's normal initializer, not truncated, as in the code of NSL's authors."""
    return keras.initializers.VarianceScaling(
        2.0, mode="fan_in", distribution="untruncated_normal"
    )


def height_and_width(shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Returns the sizes of images from a shape without batch axis."""
    channels_first = keras.config.image_data_format() == "channels_first"
    return tuple(shape[1:] if channels_first else shape[:-1])


def check_images(input_shape: tuple[int | None, ...], least: int) -> None:
    """Raises for images that are too small to pool."""
    sizes = height_and_width(input_shape)
    if len(sizes) != 2 or any(size is not None and size < least for size in sizes):
        raise ValueError(
            f"`input_shape` must be that of images of at least {least}x{least} pixels. "
            f"Received: input_shape={tuple(input_shape)}"
        )


@dataclasses.dataclass(frozen=True)
class Units:
    """Makes a network's layers with their common options.

    `make_initializer` makes an initializer for each kernel: a shared one would give kernels
    of the same shape the same values.
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
        """Returns a convolution without bias; 1x1 ones are always plain."""
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
        """Returns batch-normalized inputs."""
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
