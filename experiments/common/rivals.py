"""Published additions that make a convolution depend on its input.

Each is a `keras.layers.Conv2D` with channels last, and acts on the layer's input, which the
layer before has activated. The ratio and the number of kernels are ours.
"""

import math
from typing import Any

import keras
from keras import ops

#: Channels over the units of the squeeze, and kernels that a conditional convolution mixes.
SQUEEZE_RATIO = 4
EXPERTS = 4


@keras.saving.register_keras_serializable("experiments")
class SqueezeExciteConv2D(keras.layers.Conv2D):
    """A convolution that first scales its input's channels (Hu et al., CVPR 2018).

    Inputs of few channels, as images, are not scaled.
    """

    def build(self, input_shape: tuple[Any, ...]) -> None:
        super().build(input_shape)
        channels = input_shape[-1]
        self.squeeze = self.excite = None
        if channels > SQUEEZE_RATIO:
            units = channels // SQUEEZE_RATIO
            self.squeeze = keras.layers.Dense(units, activation="relu")
            self.excite = keras.layers.Dense(channels, activation="sigmoid")
            self.squeeze.build((None, channels))
            self.excite.build((None, units))

    def call(self, inputs: Any) -> Any:
        if self.squeeze is not None:
            scale = self.excite(self.squeeze(ops.mean(inputs, axis=(1, 2))))
            inputs = inputs * scale[:, None, None]
        return super().call(inputs)


@keras.saving.register_keras_serializable("experiments")
class ChannelAttentionConv2D(keras.layers.Conv2D):
    """The same with a convolution over the channels (ECA: Wang et al., CVPR 2020)."""

    def build(self, input_shape: tuple[Any, ...]) -> None:
        super().build(input_shape)
        channels = input_shape[-1]
        size = int(abs((math.log2(channels) + 1) / 2))
        self.across = keras.layers.Conv1D(
            1, size + 1 - size % 2, padding="same", activation="sigmoid", use_bias=False
        )
        self.across.build((None, channels, 1))

    def call(self, inputs: Any) -> Any:
        scale = self.across(ops.mean(inputs, axis=(1, 2))[..., None])
        return super().call(inputs * ops.swapaxes(scale, 1, 2)[:, None])


@keras.saving.register_keras_serializable("experiments")
class ConditionalConv2D(keras.layers.Conv2D):
    """A convolution by a sum of kernels that the input weighs (Yang et al., NeurIPS 2019).

    All kernels convolve at once, and their outputs are weighed: the same sum, and with few
    kernels faster than a kernel for each image. Multiply-adds count one kernel, which is
    what the published method takes.

    Not with groups or dilation.
    """

    # Keras's convolutions save the kernel and the bias alone.
    save_own_variables = keras.layers.Layer.save_own_variables
    load_own_variables = keras.layers.Layer.load_own_variables

    def build(self, input_shape: tuple[Any, ...]) -> None:
        super().build(input_shape)
        # A clone draws other numbers.
        self.others = [
            self.add_weight(
                name="kernel",
                shape=self.kernel.shape,
                initializer=self.kernel_initializer.clone(),
                regularizer=self.kernel_regularizer,
            )
            for _ in range(EXPERTS - 1)
        ]
        self.routing = keras.layers.Dense(EXPERTS, activation="sigmoid")
        self.routing.build((None, input_shape[-1]))

    def call(self, inputs: Any) -> Any:
        weights = self.routing(ops.mean(inputs, axis=(1, 2)))
        kernels = ops.concatenate([self.kernel, *self.others], axis=-1)
        outputs = ops.conv(inputs, kernels, self.strides, self.padding)
        parts = ops.split(outputs, EXPERTS, axis=-1)
        outputs = sum(
            weights[:, None, None, number : number + 1] * part
            for number, part in enumerate(parts)
        )
        return self.activation(outputs if self.bias is None else outputs + self.bias)
