"""SphereConv: convolutions that compare by angle rather than by inner product."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.similarity import angles
from nsl_keras.similarity.convolution_base import Convolution


class SphereConvolution(Convolution):
    """Private base: the hyperspherical convolution of `rank` spatial axes."""

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
        response: str = "cosine",
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
        self.normalize, self.response = angles.check(normalize, response)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        self.curvature = angles.add_curvature(self, self.filters, self.response)

    def call(self, inputs: Tensor) -> Tensor:
        self.compute_output_shape(inputs.shape)  # Raises for inputs that are too small.
        kernel = ops.convert_to_tensor(self.kernel)
        outputs = at_least_float32(self.convolve(inputs, kernel))
        if self.normalize in ("both", "input"):
            outputs = outputs / self._patch_norm(inputs)
        if self.normalize in ("both", "kernel"):
            norm = angles.norm(kernel, axis=tuple(range(self.rank + 1)))
            outputs = outputs / self._one_a_filter(norm)
        curvature = None if self.curvature is None else self._one_a_filter(self.curvature)
        outputs = angles.respond(outputs, self.response, curvature)
        return self.add_bias_and_activate(ops.cast(outputs, self.compute_dtype))

    def _one_a_filter(self, values: Tensor) -> Tensor:
        """Returns values of shape `(filters,)` so that they broadcast with the output."""
        shape = [1] * (self.rank + 2)
        shape[self.channel_axis] = self.filters
        return ops.reshape(values, shape)

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
        norm = angles.root(self.convolve(ops.sum(grouped, axis=axis + 1), ones))
        if self.groups > 1:
            norm = ops.repeat(norm, self.filters // self.groups, axis=axis)
        return norm

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "normalize": self.normalize,
            "response": self.response,
        }


@keras.saving.register_keras_serializable("nsl_keras")
class SphereConv2D(SphereConvolution):
    """2D hyperspherical convolution: compares kernel and input patch by their angle.

    At output position `p`, with the patch `x_p` under the kernel `W_o` of filter `o`,

        cos[p, o] = <W_o, x_p> / (n(x_p) n(W_o)),   n(a) = sqrt(sum(a^2) + 1e-4)
        y[p, o] = g(cos[p, o]) + b[o]

    with the norms that `normalize` asks for and the function `g` that `response` names:

        "cosine":             g = cos
        "linear":             g = 1 - 0.63662 arccos(cos), from -1 to 1
        "sigmoid":            g = tanh(s / 2k) / tanh(pi / 4k),   s = arcsin(cos), k = 0.3
        "learnable_sigmoid":  the same with k = |k_o| + 0.05, a weight a filter

    The cosine is the neural similarity whose `M` is `1 / (|W||x|)` on the diagonal, and
    serves as predictor of the dynamic kind.

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
        response: `"cosine"`, `"linear"`, `"sigmoid"` or `"learnable_sigmoid"`; all but the
            first need `normalize="both"`. Within 1e-6 of -1 and 1 a cosine counts as
            that far from them, with a gradient of zero.
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
        ValueError: For arguments outside the ranges above, or that do not go together, at
            construction; for an input of the wrong rank or channel count, or smaller than
            the kernel, at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.SphereConv2D(4, 3, padding="same")
    >>> outputs = layer(keras.random.normal((2, 8, 8, 3), seed=0))
    >>> tuple(outputs.shape), bool(keras.ops.max(keras.ops.abs(outputs)) <= 1)
    ((2, 8, 8, 4), True)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.1 (SphereConv
        as a special case), Section 3.3.1 (as the predictor) and Appendix B.2. The paper
        leaves the responses to the SphereNet that it builds on; formulas and constants
        (0.63662 for 2 / pi, `k_o` starting at 0.7) are those of the authors' code.
    """

    rank = 2


@keras.saving.register_keras_serializable("nsl_keras")
class SphereConv1D(SphereConvolution):
    """Private: the 1D twin of `SphereConv2D`, for predictors; may be causal."""

    rank = 1


@keras.saving.register_keras_serializable("nsl_keras")
class SphereConv3D(SphereConvolution):
    """Private: the 3D twin of `SphereConv2D`, for predictors."""

    rank = 3
