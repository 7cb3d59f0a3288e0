"""SphereNet's hyperspherical layers, which compare by angle instead of inner product.

The 1e-4 under each root gives an all-zero input the value zero and finite derivatives of
every order.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, wide_dtype
from nsl_keras.backend.built_layers import set_autocast
from nsl_keras.similarity.causal import CausalConv1D

#: Added under each root, as in the authors' code.
ROOT_OFFSET = 1e-4

NORMALIZE = ("both", "input", "kernel")
RESPONSES = ("cosine", "linear", "sigmoid", "learnable_sigmoid")

#: The authors' rounded 2 / pi.
LINEAR_SLOPE = 0.63662
SIGMOID_CURVATURE = 0.3
INITIAL_CURVATURE = 0.7
SMALLEST_CURVATURE = 0.05

#: Cosines are clipped this far from 1 and -1, where the arc cosine has no derivative.
COSINE_MARGIN = 1e-6


def respond(cosine: Tensor, response: str, curvature: Tensor | None) -> Tensor:
    """Returns `g(cos)`; only `"learnable_sigmoid"` has a curvature."""
    cosine = ops.clip(cosine, COSINE_MARGIN - 1, 1 - COSINE_MARGIN)
    if response == "linear":
        return 1 - LINEAR_SLOPE * ops.arccos(cosine)
    # The authors' fractions of exponentials as tanh, which cannot overflow for any `k`.
    k = SIGMOID_CURVATURE if curvature is None else ops.abs(curvature) + SMALLEST_CURVATURE
    largest = ops.convert_to_tensor(math.pi / (4 * k), cosine.dtype)
    return ops.tanh(ops.arcsin(cosine) / (2 * k)) / ops.tanh(largest)


class Sphere(keras.layers.Layer):
    """Mixin in front of a Keras layer: its products, divided by the norms."""

    kernel: Any
    curvature: Any = None

    def __init__(
        self,
        *args: Any,
        use_bias: bool = False,
        normalize: str = "both",
        response: str = "cosine",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, use_bias=use_bias, **kwargs)
        #: Norms and angles are computed in this dtype.
        self.precision = wide_dtype(self.variable_dtype)
        self.channel_axis = -1 if self.data_format == "channels_last" else 1
        self.normalize = validation.one_of(normalize, NORMALIZE, "normalize")
        self.response = validation.one_of(response, RESPONSES, "response")
        fits = response == "cosine" or normalize == "both"
        demand = f"'both' with response={response!r}: an angle needs both norms"
        validation.require(fits, "normalize", demand, normalize)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        fits, demand = self.quantization_mode is None, "a float policy in this layer"
        validation.require(fits, "dtype", demand, self.dtype_policy.name)
        validation.known_axis(input_shape, self.channel_axis, "channel axis")
        # Before `build`, which locks the layer if it enables LoRA.
        if self.response == "learnable_sigmoid":
            self.curvature = self.add_weight(
                name="curvature",
                shape=(self.filters,),
                initializer=keras.initializers.Constant(INITIAL_CURVATURE),
                autocast=False,
            )
        super().build(input_shape)
        # Norms are computed in the dtype of the variables.
        set_autocast(next(each for each in self.variables if each.name == "kernel"), False)

    def call(self, inputs: Tensor) -> Tensor:
        # For the reasons in `NeuralSimilarity.call`.
        shape = tuple(size if isinstance(size, int) else None for size in inputs.shape)
        if self.rank and 0 in self.compute_output_shape(shape)[1:]:
            raise ValueError(
                "`inputs` must be no smaller than the kernel: the output size would be "
                f"zero or negative. Received: inputs={shape}"
            )
        inputs = ops.cast(inputs, self.compute_dtype)
        kernel, precision = ops.convert_to_tensor(self.kernel), self.precision
        if self.normalize in ("both", "kernel"):
            # SphereNet: cos(W, x); before the product, which half precision might not hold.
            squares = ops.square(ops.cast(kernel, precision))
            sums = ops.sum(squares, axis=tuple(range(len(kernel.shape) - 1)))
            kernel = kernel / ops.sqrt(sums + ROOT_OFFSET)
        outputs = self.convolution_op(inputs, ops.cast(kernel, inputs.dtype))
        outputs = ops.cast(outputs, precision)
        if self.normalize in ("both", "input"):
            squares = ops.square(ops.convert_to_tensor(inputs, precision, sparse=False))
            shape = tuple(kernel.shape)
            if self.groups == 1:  # All filters read the same channels, summed once.
                squares = ops.sum(squares, axis=self.channel_axis, keepdims=True)
                shape = (*shape[:-2], 1, 1)
            sums = self.convolution_op(squares, ops.ones(shape, precision))
            # Not a quotient, whose gradient takes more passes.
            outputs = outputs * ops.rsqrt(sums + ROOT_OFFSET)
        per_filter = (-1, *[1] * self.rank) if self.channel_axis == 1 else (-1,)
        if self.response != "cosine":
            curvature = self.curvature
            if curvature is not None:
                curvature = ops.reshape(ops.cast(curvature, precision), per_filter)
            outputs = respond(outputs, self.response, curvature)
        if self.bias is not None:
            outputs = outputs + ops.reshape(ops.cast(self.bias, precision), per_filter)
        outputs = ops.cast(outputs, self.compute_dtype)
        return outputs if self.activation is None else self.activation(outputs)

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)  # Kernel, with LoRA merged into it, and bias.
        if self.curvature is not None:
            store["curvature"] = self.curvature

    def load_own_variables(self, store: Any) -> None:
        super().load_own_variables(store)
        if self.curvature is not None:
            self.curvature.assign(store["curvature"])

    def get_config(self) -> dict[str, Any]:
        own = {"normalize": self.normalize, "response": self.response}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable("nsl_keras")
class SphereConv1D(Sphere, CausalConv1D):
    """Private: the 1D twin of `SphereConv2D`, for predictors; may be causal."""


@keras.saving.register_keras_serializable("nsl_keras")
class SphereConv2D(Sphere, keras.layers.Conv2D):
    """2D hyperspherical convolution: compares kernel and input patch by their angle.

    At output position `p`, with the patch `x_p` under the kernel `W_o` of filter `o`,

        cos[p, o] = <W_o, x_p> / (n(x_p) n(W_o)),   n(a) = sqrt(sum(a^2) + 1e-4)
        y[p, o] = g(cos[p, o]) + b[o]

    `normalize` chooses the norms to divide by, and `response` the function `g`:

        "cosine":             g = cos
        "linear":             g = 1 - 0.63662 arccos(cos), from -1 to 1
        "sigmoid":            g = tanh(s / 2k) / tanh(pi / 4k),   s = arcsin(cos), k = 0.3
        "learnable_sigmoid":  the same with k = |k_o| + 0.05, one weight per filter

    Args:
        Same as `keras.layers.Conv2D`, plus:
        use_bias: bool; `False` by default.
        normalize: `"both"`, `"input"` or `"kernel"`. Padding counts as zeros in the norm of
            a patch, and each group has its own norm.
        response: One of the names above. All except `"cosine"` need `normalize="both"` and
            clip the cosine to ±(1 - 1e-6).

    Raises:
        ValueError: For invalid arguments, also of `keras.layers.Conv2D`, and quantized
            policies.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.SphereConv2D(4, 3, padding="same")
    >>> outputs = layer(keras.random.normal((2, 8, 8, 3), seed=0))
    >>> tuple(outputs.shape), bool(keras.ops.max(keras.ops.abs(outputs)) <= 1)
    ((2, 8, 8, 4), True)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Sections 3.1 and 3.3.1,
        Appendix B.2. The responses follow the authors' code.
    """


@keras.saving.register_keras_serializable("nsl_keras")
class SphereConv3D(Sphere, keras.layers.Conv3D):
    """Private: the 3D twin of `SphereConv2D`, for predictors."""


@keras.saving.register_keras_serializable("nsl_keras")
class SphereDense(Sphere, keras.layers.Dense):
    """Dense hyperspherical layer: compares kernel columns and input by their angle.

    For the column `W_o` of the kernel, with `n`, `g` and `normalize` as in `SphereConv2D`,

        y[o] = g(<W_o, x> / (n(x) n(W_o))) + b[o]

    Args:
        **kwargs: Arguments of `keras.layers.Dense` and `SphereConv2D`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.SphereDense(10, response="sigmoid")
    >>> tuple(layer(keras.random.normal((4, 32), seed=0)).shape)
    (4, 10)
    """

    rank, groups = 0, 1  # There is nothing to slide over.
    data_format = "channels_last"
    filters = property(attrgetter("units"))

    def convolution_op(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        return ops.matmul(inputs, kernel)
