"""The arguments, weights and shapes that every convolution of this package shares.

`Window` is what slides over an input, `Convolution` one with filters. A subclass defines
`call`, and adds its own arguments in Keras's order. Kernels are kept out of Keras's
autocast: what is computed from them is computed in float32 and cast once.
"""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity import geometry


class Window(keras.layers.Layer):
    """Private base: a window of `rank` spatial axes, its bias and its activation.

    A subclass makes the kernel, and says how many channels come out.
    """

    rank: int

    def __init__(
        self,
        kernel_size: int | tuple[int, ...],
        *,
        strides: int | tuple[int, ...],
        padding: str,
        data_format: str | None,
        dilation_rate: int | tuple[int, ...],
        activation: Any,
        use_bias: bool,
        bias_initializer: Any,
        bias_regularizer: Any,
        activity_regularizer: Any,
        bias_constraint: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(activity_regularizer=activity_regularizer, **kwargs)
        self.kernel_size = validation.positive_integers(
            kernel_size, self.rank, "kernel_size"
        )
        self.strides = validation.positive_integers(strides, self.rank, "strides")
        self.padding = geometry.standardize_padding(padding, self.rank)
        self.data_format = validation.one_of(
            data_format or keras.config.image_data_format(),
            ("channels_last", "channels_first"),
            "data_format",
        )
        self.dilation_rate = validation.positive_integers(
            dilation_rate, self.rank, "dilation_rate"
        )
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        if max(self.strides) > 1 and max(self.dilation_rate) > 1:
            raise ValueError(
                "`strides` and `dilation_rate` must not both exceed 1. Received: "
                f"strides={strides}, dilation_rate={dilation_rate}"
            )
        self.input_spec = keras.layers.InputSpec(ndim=self.rank + 2)

    @property
    def channel_axis(self) -> int:
        """Axis of the channels: -1 or 1."""
        return -1 if self.data_format == "channels_last" else 1

    @property
    def taps(self) -> int:
        """Number of taps `T`, the product of `kernel_size`."""
        return math.prod(self.kernel_size)

    def output_channels(self, input_channels: int | None) -> int | None:
        """Returns the number of channels that come out."""
        raise NotImplementedError

    def _build_window(self, input_shape: tuple[int | None, ...]) -> int:
        """Checks the input's shape, makes the bias, and returns the input's channels."""
        validation.rank(input_shape, self.rank + 2)
        input_channels = validation.known_axis(
            input_shape, self.channel_axis, "channel axis"
        )
        self.compute_output_shape(input_shape)
        self.input_spec = keras.layers.InputSpec(
            ndim=self.rank + 2, axes={self.channel_axis: input_channels}
        )
        return input_channels

    def _build_bias(self, input_channels: int) -> None:
        self.bias = (
            self.add_weight(
                name="bias",
                shape=(self.output_channels(input_channels),),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
            if self.use_bias
            else None
        )

    def add_bias_and_activate(self, outputs: Tensor) -> Tensor:
        """Returns `activation(outputs + bias)`."""
        if self.bias is not None:
            shape = [1] * (self.rank + 2)
            shape[self.channel_axis] = self.bias.shape[0]
            # Not `ops.add`: with channels first on TensorFlow it adds the bias along the
            # width where that equals the number of filters (Keras 3.15).
            outputs = outputs + ops.reshape(ops.cast(self.bias, outputs.dtype), shape)
        return outputs if self.activation is None else self.activation(outputs)

    def _pad_causal(self, inputs: Tensor) -> Tensor:
        """Returns inputs with zeros before them, for `padding="causal"`."""
        before = (self.kernel_size[0] - 1) * self.dilation_rate[0]
        widths = [[0, 0], [0, 0], [0, 0]]
        widths[1 if self.data_format == "channels_last" else 2] = [before, 0]
        return ops.pad(inputs, widths)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        validation.rank(input_shape, self.rank + 2)
        return geometry.output_shape(
            input_shape,
            self.output_channels(input_shape[self.channel_axis]),
            self.kernel_size,
            self.strides,
            self.padding,
            self.dilation_rate,
            self.data_format,
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "kernel_size": self.kernel_size,
            "strides": self.strides,
            "padding": self.padding,
            "data_format": self.data_format,
            "dilation_rate": self.dilation_rate,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "activity_regularizer": keras.regularizers.serialize(self.activity_regularizer),
            "bias_constraint": keras.constraints.serialize(self.bias_constraint),
        }


class Convolution(Window):
    """Private base: a convolution of `rank` spatial axes, without its `call`."""

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, ...],
        strides: int | tuple[int, ...] = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: int | tuple[int, ...] = 1,
        groups: int = 1,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kernel_size,
            strides=strides,
            padding=padding,
            data_format=data_format,
            dilation_rate=dilation_rate,
            activation=activation,
            use_bias=use_bias,
            bias_initializer=bias_initializer,
            bias_regularizer=bias_regularizer,
            activity_regularizer=activity_regularizer,
            bias_constraint=bias_constraint,
            **kwargs,
        )
        self.filters = validation.positive_integer(filters, "filters")
        self.groups = validation.positive_integer(groups, "groups")
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        if self.filters % self.groups:
            raise ValueError(
                "`filters` must be divisible by `groups`. "
                f"Received: filters={filters}, groups={groups}"
            )

    def output_channels(self, input_channels: int | None) -> int:
        del input_channels
        return self.filters

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        input_channels = self._build_window(input_shape)
        if input_channels % self.groups:
            raise ValueError(
                "The number of input channels must be divisible by `groups`. "
                f"Received: input_shape={tuple(input_shape)}, groups={self.groups}"
            )
        self.kernel = self.add_weight(
            name="kernel",
            shape=(*self.kernel_size, input_channels // self.groups, self.filters),
            initializer=self.kernel_initializer,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
            autocast=False,
        )
        self._build_bias(input_channels)

    def convolve(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        """Returns the plain convolution of the layer's geometry with `kernel`."""
        causal = self.padding == "causal"
        return ops.conv(
            self._pad_causal(inputs) if causal else inputs,
            ops.cast(kernel, inputs.dtype),
            strides=self.strides,
            padding="valid" if causal else self.padding,
            data_format=self.data_format,
            dilation_rate=self.dilation_rate,
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "filters": self.filters,
            "groups": self.groups,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
        }
