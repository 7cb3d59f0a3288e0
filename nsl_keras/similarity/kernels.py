"""The kernel of layers that derive from Keras's and compute with it in another way."""

from __future__ import annotations

from typing import Any, NoReturn

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor

#: Keras's error for inputs that are smaller than the kernel.
TOO_SMALL = (
    "Computed output size would be zero or negative: the kernel must fit into the input. "
    "Received: kernel_size={}, input_shape={}"
)


class FloatKernel(keras.layers.Layer):
    """Private mixin, in front of a Keras layer whose `call` the subclass replaces.

    The kernel is kept out of Keras's autocast: equivalent kernels and norms are computed
    in float32. LoRA, DoRA and quantization, which change Keras's `call`, are refused.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        first = getattr(self, "data_format", None) == "channels_first"
        self.channel_axis = 1 if first else -1
        if hasattr(self, "kernel_size"):
            validation.geometry(self)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        if self.quantization_mode is not None:
            self._refuse()
        validation.known_axis(input_shape, self.channel_axis, "channel axis")
        super().build(input_shape)

    def add_weight(self, *args: Any, **kwargs: Any) -> keras.Variable:
        if kwargs.get("name") == "kernel":
            kwargs["autocast"] = False
        return super().add_weight(*args, **kwargs)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            f"{type(self).__name__} takes no LoRA, DoRA or quantized dtype policy, which "
            f"replace the kernel. Received: layer {self.name!r} with dtype="
            f"{self.dtype_policy}"
        )

    # Keras calls these in `build` for `lora_rank` and `dora_rank`.
    enable_lora = enable_dora = _refuse
    # Keras's error, at which `Model.quantize` passes over a layer.
    quantize = keras.layers.Layer.quantize


def causal_convolution(layer: Any, inputs: Tensor, kernel: Tensor) -> Tensor:
    """Returns `Conv1D.convolution_op`, which leaves out the padding of causal layers."""
    if layer.padding == "causal":
        padding = [[0, 0], [0, 0], [0, 0]]
        before = (layer.kernel_size[0] - 1) * layer.dilation_rate[0]
        padding[1 if layer.data_format == "channels_last" else 2][0] = before
        inputs = ops.pad(inputs, padding)
    return ops.conv(
        inputs,
        kernel,
        strides=layer.strides,
        padding="valid" if layer.padding == "causal" else layer.padding,
        data_format=layer.data_format,
        dilation_rate=layer.dilation_rate,
    )
