"""Keras's `Conv1D` with a product that pads causally."""

from __future__ import annotations

import keras
from keras import ops

from nsl_keras.backend import Tensor


class CausalConv1D(keras.layers.Conv1D):
    """Private base of 1D convolutions: Keras's `convolution_op` refuses `"causal"`."""

    def convolution_op(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        padding = self.padding
        if padding == "causal":
            zeros = [[0, 0], [0, 0], [0, 0]]
            axis = 1 if self.data_format == "channels_last" else 2
            zeros[axis][0] = (self.kernel_size[0] - 1) * self.dilation_rate[0]
            inputs, padding = ops.pad(inputs, zeros), "valid"
        options = (self.strides, padding, self.data_format, self.dilation_rate)
        return ops.conv(inputs, kernel, *options)
