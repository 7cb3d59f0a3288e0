"""A mixin for layers that keep a Keras layer's kernel but replace its `call`; shifts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.backend.built_layers import set_autocast


class FloatDense(keras.layers.Dense):
    """A dense layer inside another layer; `Model.quantize` skips both.

    Otherwise a quantized model could not be reloaded, because the enclosing layer makes
    this one anew with its own dtype.
    """

    quantize = keras.layers.Layer.quantize


class FloatKernel(keras.layers.Layer):
    """Private mixin, in front of a Keras layer, with another product of input and kernel.

    The subclass's `apply_kernel(inputs)` returns the outputs before bias and activation.
    Keras does not autocast the kernel, so equivalent kernels and norms are computed in the
    variables' dtype. Keras quantizes no derived layers; quantized policies are refused,
    except for the modes in `quantized`.
    """

    #: The quantization modes that a subclass supports.
    quantized: tuple[str, ...] = ()

    operation = staticmethod(ops.conv)
    kernel_name = "kernel"
    data_format = "channels_last"  # Dense layers know no other.

    @property
    def channel_axis(self) -> int:
        return -1 if self.data_format == "channels_last" else 1

    @property
    def input_axes(self) -> tuple[int, ...]:
        """The axes of the input with the features that a filter reads at one position."""
        return (self.channel_axis,)

    def per_filter(self, values: Tensor) -> Tensor:
        """Returns one number per filter in a shape that broadcasts to the outputs."""
        first = self.channel_axis == 1
        return ops.reshape(values, (-1, *[1] * self.rank)) if first else values

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.require_plain_kernel()
        for axis in self.input_axes:
            validation.known_axis(input_shape, axis, "channel axis")
        super().build(input_shape)
        set_autocast(self.kernel_variable, False)

    @property
    def kernel_variable(self) -> keras.Variable:
        """The weight that holds the kernel; `kernel` adds LoRA, if enabled, to it."""
        # Own variables come before those of sublayers.
        return next(each for each in self.variables if each.name == self.kernel_name)

    def require_plain_kernel(self) -> None:
        """Raises if the kernel has a quantization mode that the layer does not support."""
        fits = self.quantization_mode in (None, *self.quantized)
        kinds = ", ".join(["float", *self.quantized])
        demand = f"one of {kinds} in a {type(self).__name__}"
        received = f"{self.dtype_policy.name} of {self.name}"
        validation.require(fits, "dtype", demand, received)

    def call(self, inputs: Tensor) -> Tensor:
        # For inputs smaller than the kernel TensorFlow's convolution returns uninitialized
        # memory (2.21, CPU). Keras raises, but older versions let zero positions pass.
        # JAX represents unknown sizes by symbols, which Keras does not compute with.
        shape = tuple(size if isinstance(size, int) else None for size in inputs.shape)
        if hasattr(self, "kernel_size") and 0 in self.compute_output_shape(shape)[1:]:
            raise ValueError(
                "`inputs` must be no smaller than the kernel: the output size would be "
                f"zero or negative. Received: inputs={shape}"
            )
        # Integers too: Keras leaves them as they are.
        outputs = self.apply_kernel(ops.cast(inputs, self.compute_dtype))
        if self.bias is not None:
            # Keras's layers use `ops.add`, which with channels first on TensorFlow adds the
            # bias along the width if it equals the number of filters (Keras 3.15).
            bias = ops.cast(self.bias, outputs.dtype)
            is_last = self.data_format == "channels_last"
            outputs = outputs + (bias if is_last else self.per_filter(bias))
        return outputs if self.activation is None else self.activation(outputs)

    def plain_product(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        """Returns the Keras layer's product of inputs and a kernel: a convolution."""
        padding = self.padding
        if padding == "causal":  # `Conv1D.convolution_op` leaves out the zeros.
            zeros = [[0, 0], [0, 0], [0, 0]]
            axis = 2 if self.channel_axis == 1 else 1
            zeros[axis][0] = (self.kernel_size[0] - 1) * self.dilation_rate[0]
            inputs, padding = ops.pad(inputs, zeros), "valid"
        options = (self.strides, padding, self.data_format, self.dilation_rate)
        return self.operation(inputs, kernel, *options)


def windows(
    inputs: Tensor,
    kernel_size: Sequence[int],
    strides: Sequence[int],
    padding: str,
    dilation_rate: Sequence[int],
) -> list[Tensor]:
    """Returns the input under every tap, as shifted copies."""
    # Each size is an int if known, else a scalar tensor, or a symbol of JAX.
    batch, *sizes, channels = ops.shape(inputs)
    lengths, extents, paddings = [], [], []
    for size, k, s, d in zip(sizes, kernel_size, strides, dilation_rate, strict=True):
        maximum: Any = ops.maximum if ops.is_tensor(size) else max
        reach = (k - 1) * d
        # The number of output positions. ONNX truncates quotients: none may be negative.
        length = (size - (reach if padding == "valid" else 0) - 1) // s + 1
        needed = maximum((length - 1) * s + reach + 1 - size, 0)
        before = {"valid": 0, "causal": reach, "same": needed // 2}[padding]
        extent = s * (length + reach // s)
        lengths.append(length)
        extents.append(extent)
        paddings.append([before, maximum(extent - before - size, 0)])
    # Each axis is split into s phases (every s-th pixel), so a tap is a slice of one phase.
    phases: dict[tuple[int, ...], Tensor]
    phases = {(0,) * len(extents): ops.pad(inputs, [[0, 0], *paddings, [0, 0]])}
    for axis, (stride, extent) in enumerate(zip(strides, extents, strict=True)):
        if stride > 1:
            phases = {
                (*place[:axis], number, *place[axis + 1 :]): phase
                for place, tensor in phases.items()
                for number, phase in enumerate(_phases(tensor, axis + 1, stride, extent))
            }
    shifted = []
    for tap in itertools.product(*(range(k) for k in kernel_size)):
        offsets = [t * d for t, d in zip(tap, dilation_rate, strict=True)]
        place = tuple(o % s for o, s in zip(offsets, strides, strict=True))
        start = [o // s for o, s in zip(offsets, strides, strict=True)]
        # A slice, whose gradient is a padding: without XLA on a CPU, TensorFlow computes
        # the gradient of indexing several times slower.
        shifted.append(
            ops.slice(phases[place], (0, *start, 0), (batch, *lengths, channels))
        )
    return shifted


def _phases(tensor: Tensor, axis: int, stride: int, extent: Any) -> list[Tensor]:
    """Returns the first `extent` pixels along an axis, dealt out to `stride` tensors."""
    shape = list(ops.shape(tensor))
    shape[axis] = extent
    cropped = ops.slice(tensor, (0,) * len(shape), shape)
    shape[axis : axis + 1] = [extent // stride, stride]
    return ops.unstack(ops.reshape(cropped, shape), stride, axis + 1)
