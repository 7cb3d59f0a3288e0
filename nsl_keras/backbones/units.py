"""The parts of backbones: convolutions, batch norms, dense layers."""

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
#: Makes the initializers of their kernels.
GLOROT = keras.initializers.GlorotUniform


def he_normal() -> keras.initializers.Initializer:
    """Returns He's normal initializer, not truncated, as in the code of NSL's authors."""
    return keras.initializers.VarianceScaling(
        2.0, mode="fan_in", distribution="untruncated_normal"
    )


def channel_axis() -> int:
    """Returns the channel axis of images and of their feature vectors."""
    return 1 if keras.config.image_data_format() == "channels_first" else -1


def height_and_width(shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Returns the sizes of images from a shape without batch axis."""
    return tuple(shape[1:] if channel_axis() == 1 else shape[:-1])


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
    of the same shape the same numbers.
    """

    convolution: Factory
    normalization: Factory
    kernel_regularizer: Any = None
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
        options = {"strides": 1, "padding": "same", **options}
        return make(
            filters,
            kernel_size,
            use_bias=False,
            name=f"{name}_convolution",
            **self._kernel_options(),
            **options,
        )(inputs)

    def normalize(self, inputs: Tensor, name: str) -> Tensor:
        """Returns batch-normalized inputs."""
        layer = self.normalization(axis=channel_axis(), name=f"{name}_normalization")
        return layer(inputs)

    def activate(self, inputs: Tensor, name: str) -> Tensor:
        """Returns batch norm and ReLU."""
        return keras.layers.ReLU(name=f"{name}_relu")(self.normalize(inputs, name))

    def unit(
        self, inputs: Tensor, filters: int, kernel_size: int, name: str, **options: Any
    ) -> Tensor:
        """Returns convolution, batch norm and ReLU; arguments are those of `convolve`."""
        outputs = self.convolve(inputs, filters, kernel_size, name, **options)
        return self.activate(outputs, name)

    def dense(self, inputs: Tensor, units: int, name: str, use_bias: bool = True) -> Tensor:
        """Returns a fully connected layer."""
        return keras.layers.Dense(
            units, use_bias=use_bias, name=name, **self._kernel_options()
        )(inputs)

    def _kernel_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"kernel_initializer": self.make_initializer()}
        if self.kernel_regularizer is not None:  # A factory may have its own.
            options["kernel_regularizer"] = self.kernel_regularizer
        return options
