"""What the backbones are made of: convolutions, batch norms, dense layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.backend import Tensor

#: Called with the arguments of `keras.layers.Conv2D`; returns a layer.
Convolution = Callable[..., keras.layers.Layer]

#: Called with the arguments of `keras.layers.BatchNormalization`; returns a layer.
Normalization = Callable[..., keras.layers.Layer]


def he_normal() -> keras.initializers.Initializer:
    """Returns He's normal initializer, untruncated as the authors of NSL have it."""
    return keras.initializers.VarianceScaling(
        2.0, mode="fan_in", distribution="untruncated_normal"
    )


def channel_axis(rank: int = 4) -> int:
    """Returns the channel axis of tensors of so many axes."""
    first = keras.config.image_data_format() == "channels_first" and rank > 2
    return 1 if first else -1


def height_and_width(shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Returns the sizes of images from a shape without batch axis."""
    return tuple(shape[1:] if channel_axis() == 1 else shape[:-1])


def check_images(
    input_shape: tuple[int | None, ...], least: int, known: bool = False
) -> None:
    """Raises unless height and width are at least so large and, if asked, known."""
    if len(input_shape) != 3:
        raise ValueError(
            "`input_shape` must have three axes, (height, width, channels) or, channels "
            f"first, (channels, height, width). Received: input_shape={input_shape}"
        )
    channels = input_shape[channel_axis()]
    if not isinstance(channels, int) or channels < 1:
        raise ValueError(
            "`input_shape` must have a known number of channels, of at least 1. "
            f"Received: input_shape={tuple(input_shape)}"
        )
    sizes = height_and_width(input_shape)
    if any(known if size is None else size < least for size in sizes):
        demand = "of known size, at least" if known else "at least"
        raise ValueError(
            f"`input_shape` must be {demand} {least}x{least} pixels. "
            f"Received: input_shape={tuple(input_shape)}"
        )


def check_classes(classes: int | None) -> None:
    """Raises unless it is a number of classes, or `None` for features."""
    if classes is not None:
        validation.positive_integer(classes, "classes")


@dataclasses.dataclass(frozen=True)
class Units:
    """Makes a network's layers, with the options that they have in common.

    Attributes:
        convolution: Makes the convolutions that may carry a similarity; 1x1 convolutions
            and those asked to be plain are `keras.layers.Conv2D`.
        normalization: Makes the batch norms.
        momentum: Momentum of the batch norms.
        synchronized: Whether batch norms take their statistics over all replicas.
        kernel_regularizer: Regularizer of all kernels.
        epsilon: What batch norms add to the variances.
        normalization_regularizer: Regularizer of the batch norms' scales and shifts.
        make_initializer: Makes an initializer for each kernel: one object would start
            kernels of the same shape from the same numbers.
    """

    convolution: Convolution
    normalization: Normalization
    momentum: float
    synchronized: bool
    kernel_regularizer: Any
    epsilon: float = 1e-3
    normalization_regularizer: Any = None
    make_initializer: Callable[[], keras.initializers.Initializer] = he_normal

    def __post_init__(self) -> None:
        if not callable(self.convolution):
            raise ValueError(
                "`convolution` must be a callable that takes the arguments of "
                "`keras.layers.Conv2D` and returns a layer. "
                f"Received: convolution={self.convolution!r}"
            )
        if not callable(self.normalization):
            raise ValueError(
                "`batch_normalization` must be a callable that takes the arguments of "
                "`keras.layers.BatchNormalization` and returns a layer. "
                f"Received: batch_normalization={self.normalization!r}"
            )
        validation.boolean(self.synchronized, "synchronized")
        validation.fraction(self.momentum, "batch_normalization_momentum")
        validation.positive_number(self.epsilon, "batch_normalization_epsilon")

    def convolve(
        self,
        inputs: Tensor,
        filters: int,
        kernel_size: Any,
        name: str,
        plain: bool = False,
        **options: Any,
    ) -> Tensor:
        """Returns a convolution without bias, "same" unless `options` say otherwise."""
        plain = plain or kernel_size == 1
        given = {
            "use_bias": False,
            "kernel_initializer": self.make_initializer(),
            "kernel_regularizer": self.kernel_regularizer,
            "name": f"{name}_convolution",
            "strides": 1,
            "padding": "same",
            **options,
        }
        if plain:
            return keras.layers.Conv2D(filters, kernel_size, **given)(inputs)
        given = _without_fixed(given, self.convolution, "convolution")
        return self.convolution(filters, kernel_size, **given)(inputs)

    def normalize(self, inputs: Tensor, name: str) -> Tensor:
        """Returns batch-normalized inputs."""
        given = {
            "axis": channel_axis(len(inputs.shape)),
            "momentum": self.momentum,
            "epsilon": self.epsilon,
            "gamma_regularizer": self.normalization_regularizer,
            "beta_regularizer": self.normalization_regularizer,
            "synchronized": self.synchronized,
            "name": f"{name}_normalization",
        }
        given = _without_fixed(given, self.normalization, "batch_normalization")
        return self.normalization(**given)(inputs)

    def activate(self, inputs: Tensor, name: str) -> Tensor:
        """Returns batch norm and ReLU."""
        return keras.layers.ReLU(name=f"{name}_relu")(self.normalize(inputs, name))

    def unit(
        self, inputs: Tensor, filters: int, kernel_size: int, name: str, **options: Any
    ) -> Tensor:
        """Returns convolution, batch norm and ReLU; arguments are those of `convolve`."""
        return self.activate(
            self.convolve(inputs, filters, kernel_size, name, **options), name
        )

    def dense(self, inputs: Tensor, units: int, name: str, use_bias: bool) -> Tensor:
        """Returns a fully connected layer."""
        return keras.layers.Dense(
            units,
            use_bias=use_bias,
            kernel_initializer=self.make_initializer(),
            kernel_regularizer=self.kernel_regularizer,
            name=name,
        )(inputs)


def _without_fixed(
    given: dict[str, Any], factory: Callable[..., Any], argument: str
) -> dict[str, Any]:
    """Returns options without those that are `None` here and fixed in a partial function.

    Raises:
        ValueError: If the partial function fixes another of them: it would be overridden.
    """
    fixed = [name for name in getattr(factory, "keywords", ()) if name in given]
    for name in fixed:
        if given[name] is not None:
            raise ValueError(
                f"`{argument}` must leave `{name}` to the network, which sets it for each "
                f"layer. Received: {argument}={factory!r}"
            )
    return {name: value for name, value in given.items() if name not in fixed}
