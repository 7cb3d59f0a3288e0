"""The arguments, weights and shapes that every convolution of this package shares.

A subclass defines `call`, and adds its own arguments in Keras's order. Kernels are kept
out of Keras's autocast: what is computed from them is computed in float32 and cast once.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.similarity import geometry

Tensor = Any


class Convolution(keras.layers.Layer):
    """Private base: a convolution of `rank` spatial axes, without its `call`."""

    rank: int

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
        super().__init__(activity_regularizer=activity_regularizer, **kwargs)
        self.filters = validation.positive_integer(filters, "filters")
        self.kernel_size = validation.positive_integers(
            kernel_size, self.rank, "kernel_size"
        )
        self.strides = validation.positive_integers(strides, self.rank, "strides")
        padding = padding.lower() if isinstance(padding, str) else padding
        self.padding = validation.one_of(padding, ("valid", "same"), "padding")
        self.data_format = validation.one_of(
            data_format or keras.config.image_data_format(),
            ("channels_last", "channels_first"),
            "data_format",
        )
        self.dilation_rate = validation.positive_integers(
            dilation_rate, self.rank, "dilation_rate"
        )
        self.groups = validation.positive_integer(groups, "groups")
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        if self.filters % self.groups:
            raise ValueError(
                "`filters` must be divisible by `groups`. "
                f"Received: filters={filters}, groups={groups}"
            )
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
        taps = 1
        for size in self.kernel_size:
            taps *= size
        return taps

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        validation.rank(input_shape, self.rank + 2)
        input_channels = validation.known_axis(
            input_shape, self.channel_axis, "channel axis"
        )
        if input_channels % self.groups:
            raise ValueError(
                "The number of input channels must be divisible by `groups`. "
                f"Received: input_shape={tuple(input_shape)}, groups={self.groups}"
            )
        self.compute_output_shape(input_shape)
        self.input_spec = keras.layers.InputSpec(
            ndim=self.rank + 2, axes={self.channel_axis: input_channels}
        )
        self.kernel = self.add_weight(
            name="kernel",
            shape=(*self.kernel_size, input_channels // self.groups, self.filters),
            initializer=self.kernel_initializer,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
            autocast=False,
        )
        self.bias = (
            self.add_weight(
                name="bias",
                shape=(self.filters,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
            if self.use_bias
            else None
        )

    def convolve(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        """Returns the plain convolution of the layer's geometry with `kernel`."""
        return ops.conv(
            inputs,
            ops.cast(kernel, inputs.dtype),
            strides=self.strides,
            padding=self.padding,
            data_format=self.data_format,
            dilation_rate=self.dilation_rate,
        )

    def add_bias_and_activate(self, outputs: Tensor) -> Tensor:
        """Returns `activation(outputs + bias)`."""
        if self.bias is not None:
            shape = [1] * (self.rank + 2)
            shape[self.channel_axis] = self.filters
            # Not `ops.add`: with channels first on TensorFlow it adds the bias along the
            # width where that equals the number of filters (Keras 3.15).
            outputs = outputs + ops.reshape(ops.cast(self.bias, outputs.dtype), shape)
        return outputs if self.activation is None else self.activation(outputs)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return geometry.output_shape(
            input_shape,
            self.filters,
            self.kernel_size,
            self.strides,
            self.padding,
            self.dilation_rate,
            self.data_format,
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "filters": self.filters,
            "kernel_size": self.kernel_size,
            "strides": self.strides,
            "padding": self.padding,
            "data_format": self.data_format,
            "dilation_rate": self.dilation_rate,
            "groups": self.groups,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "activity_regularizer": keras.regularizers.serialize(self.activity_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "bias_constraint": keras.constraints.serialize(self.bias_constraint),
        }
