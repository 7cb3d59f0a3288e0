"""A mixin for layers that keep a Keras layer's kernel but replace its `call`."""

from __future__ import annotations

from typing import Any, NoReturn

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor


class FloatDense(keras.layers.Dense):
    """A dense layer inside another layer; `Model.quantize` skips both.

    Otherwise a quantized model could not be reloaded: the enclosing layer recreates this
    one with its own dtype.
    """

    quantize = keras.layers.Layer.quantize


class FloatEinsumDense(keras.layers.EinsumDense):
    """Like `FloatDense`, for `keras.layers.EinsumDense`; it passes masks on."""

    quantize = keras.layers.Layer.quantize

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_masking = True


class FloatKernel(keras.layers.Layer):
    """Private mixin, in front of a Keras layer whose `call` the subclass replaces.

    The kernel is kept out of Keras's autocast: equivalent kernels and norms are computed
    in the variables' dtype. LoRA, DoRA and quantization, which change Keras's `call`, are
    refused.
    """

    operation = staticmethod(ops.conv)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        first = getattr(self, "data_format", None) == "channels_first"
        self.channel_axis = 1 if first else -1
        #: The shape in which one number per filter broadcasts to the outputs.
        self.filters_shape = (-1, *[1] * self.rank) if first else (-1,)

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

    def call(self, inputs: Tensor, training: bool | None = None, **options: Any) -> Tensor:
        """Returns the outputs; `options` go to `product`."""
        # On inputs smaller than the kernel TensorFlow's convolution returns uninitialized
        # memory (2.21, on a CPU). Keras raises; older versions let zero positions pass.
        # JAX has symbols for unknown sizes, which Keras does not compute with.
        shape = tuple(size if isinstance(size, int) else None for size in inputs.shape)
        if hasattr(self, "kernel_size"):
            if 0 in self.compute_output_shape(shape)[1:]:
                raise ValueError(
                    "Computed output size would be zero or negative: the kernel must fit "
                    f"into the input. Received: kernel_size={self.kernel_size}, "
                    f"input_shape={shape}"
                )
            if not keras.backend.is_float_dtype(inputs.dtype):
                raise ValueError(
                    "The inputs of a convolution must be floats. Received: inputs of dtype "
                    f"{keras.backend.standardize_dtype(inputs.dtype)}"
                )
        # Integers too, in dense layers: Keras leaves them as they are.
        outputs = self.product(ops.cast(inputs, self.compute_dtype), training, **options)
        if self.bias is not None:
            # Not `ops.add`, as in Keras's layers: with channels first on TensorFlow it adds
            # the bias along the width where that equals the number of filters (Keras 3.15).
            bias = ops.cast(self.bias, outputs.dtype)
            outputs = outputs + ops.reshape(bias, self.filters_shape)
        return outputs if self.activation is None else self.activation(outputs)

    def product(self, inputs: Tensor, training: bool | None) -> Tensor:
        """Returns the outputs before bias and activation."""
        raise NotImplementedError

    def plain_product(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        """Returns the Keras layer's product of inputs and a kernel: a convolution."""
        padding = self.padding
        if padding == "causal":  # `Conv1D.convolution_op` leaves out the zeros.
            zeros = [[0, 0], [0, 0], [0, 0]]
            axis = 2 if self.channel_axis == 1 else 1
            zeros[axis][0] = (self.kernel_size[0] - 1) * self.dilation_rate[0]
            inputs, padding = ops.pad(inputs, zeros), "valid"
        return self.operation(
            inputs,
            kernel,
            strides=self.strides,
            padding=padding,
            data_format=self.data_format,
            dilation_rate=self.dilation_rate,
        )

    # Keras calls these in `build` for `lora_rank` and `dora_rank`.
    enable_lora = enable_dora = _refuse
    # `Layer.quantize` raises the error that makes `Model.quantize` skip this layer.
    quantize = keras.layers.Layer.quantize
