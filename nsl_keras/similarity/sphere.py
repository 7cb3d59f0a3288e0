"""SphereConv: convolutions that compare by angle rather than by inner product.

The 1e-4 stands under each root, so that an all-zero patch has the value zero and finite
derivatives of every order. Norms are taken in float32.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend.precision import at_least_float32
from nsl_keras.similarity.convolution_base import Convolution

Tensor = Any

#: Added under each root, as the authors' code has it.
NORM_EPSILON = 1e-4


@keras.saving.register_keras_serializable("nsl_keras")
class SphereConv2D(Convolution):
    """2D hyperspherical convolution: the cosine of kernel and input patch.

    At output position `p`, with the patch `x_p` under the kernel `W_o` of filter `o`,

        y[p, o] = <W_o, x_p> / (n(x_p) n(W_o)) + b[o],   n(a) = sqrt(sum(a^2) + 1e-4)

    with the norms that `normalize` asks for. It is the neural similarity whose `M` is
    `1 / (|W||x|)` on the diagonal, and serves as predictor of the dynamic kind.

    Args:
        filters: int, the number of output channels.
        kernel_size: int or tuple of 2 ints, height and width of the kernel.
        strides: int or tuple of 2 ints, the strides.
        padding: `"valid"` or `"same"`, zeros on either side. The norm of a patch that
            reaches over the border is that of its padded form.
        data_format: `"channels_last"` or `"channels_first"`; defaults to
            `keras.config.image_data_format()`.
        dilation_rate: int or tuple of 2 ints, the dilation; not with strides above 1.
        groups: int, the number of groups the channels are split into; each has its own
            patch norm.
        normalize: `"both"`, `"input"` or `"kernel"`, the norms divided by.
        activation: Activation function, `None` for none.
        use_bias: bool, whether to add a bias; `False` keeps outputs of
            `normalize="both"` in [-1, 1].
        kernel_initializer: Initializer of the kernel.
        bias_initializer: Initializer of the bias.
        kernel_regularizer: Regularizer of the kernel.
        bias_regularizer: Regularizer of the bias.
        activity_regularizer: Regularizer of the output.
        kernel_constraint: Constraint on the kernel.
        bias_constraint: Constraint on the bias.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Input shape:
        `(batch, height, width, channels)` with `data_format="channels_last"`,
        `(batch, channels, height, width)` with `"channels_first"`.

    Output shape:
        `(batch, new_height, new_width, filters)` or
        `(batch, filters, new_height, new_width)`.

    Raises:
        ValueError: For arguments outside the ranges above, at construction; for an input
            of the wrong rank or channel count, or smaller than the kernel, at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.SphereConv2D(4, 3, padding="same")
    >>> outputs = layer(keras.random.normal((2, 8, 8, 3), seed=0))
    >>> tuple(outputs.shape), bool(keras.ops.max(keras.ops.abs(outputs)) <= 1)
    ((2, 8, 8, 4), True)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.1 (SphereConv
        as a special case) and Section 3.3.1 (as the predictor).
    """

    rank = 2

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, ...],
        strides: int | tuple[int, ...] = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: int | tuple[int, ...] = 1,
        groups: int = 1,
        normalize: str = "both",
        activation: Any = None,
        use_bias: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            filters,
            kernel_size,
            strides=strides,
            padding=padding,
            data_format=data_format,
            dilation_rate=dilation_rate,
            groups=groups,
            activation=activation,
            use_bias=use_bias,
            **kwargs,
        )
        self.normalize = validation.one_of(
            normalize, ("both", "input", "kernel"), "normalize"
        )

    def call(self, inputs: Tensor) -> Tensor:
        self.compute_output_shape(inputs.shape)  # Raises for images that are too small.
        kernel = ops.convert_to_tensor(self.kernel)
        outputs = at_least_float32(self.convolve(inputs, kernel))
        if self.normalize in ("both", "input"):
            outputs = outputs / self._patch_norm(inputs)
        if self.normalize in ("both", "kernel"):
            axes = tuple(range(self.rank + 1))
            norm = ops.sqrt(ops.sum(ops.square(kernel), axis=axes) + NORM_EPSILON)
            shape = [1] * (self.rank + 2)
            shape[self.channel_axis] = self.filters
            outputs = outputs / ops.reshape(norm, shape)
        return self.add_bias_and_activate(ops.cast(outputs, self.compute_dtype))

    def _patch_norm(self, inputs: Tensor) -> Tensor:
        """Norm of the patch under each output position, one channel a group."""
        squares = ops.square(at_least_float32(inputs))
        axis = self.channel_axis if self.channel_axis > 0 else self.rank + 1
        shape = ops.shape(inputs)
        width = shape[axis] // self.groups
        grouped = ops.reshape(
            squares, (*shape[:axis], self.groups, width, *shape[axis + 1 :])
        )
        ones = ops.ones((*self.kernel_size, 1, self.groups), dtype=squares.dtype)
        sums = self.convolve(ops.sum(grouped, axis=axis + 1), ones)
        norm = ops.sqrt(sums + NORM_EPSILON)
        if self.groups > 1:
            norm = ops.repeat(norm, self.filters // self.groups, axis=axis)
        return norm

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "normalize": self.normalize}
