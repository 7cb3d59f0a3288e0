"""SphereDense: the dense layer that compares by angle."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.similarity import angles


@keras.saving.register_keras_serializable("nsl_keras")
class SphereDense(keras.layers.Layer):
    """Dense hyperspherical layer: compares kernel columns and input by their angle.

    With the column `W_o` of the kernel that belongs to output `o`,

        cos[o] = <W_o, x> / (n(x) n(W_o)),   n(a) = sqrt(sum(a^2) + 1e-4)
        y[o] = g(cos[o]) + b[o]

    with the norms that `normalize` asks for and the function `g` that `response` names,
    as in `SphereConv2D`: on a 1x1 image the two layers are the same.

    Args:
        units: int, the number of outputs.
        activation: Activation function, `None` for none.
        use_bias: bool, whether to add a bias; `False` keeps outputs of
            `normalize="both"` in [-1, 1].
        kernel_initializer: Initializer of the kernel, of shape `(features, units)`.
        bias_initializer: Initializer of the bias.
        kernel_regularizer: Regularizer of the kernel.
        bias_regularizer: Regularizer of the bias.
        activity_regularizer: Regularizer of the output.
        kernel_constraint: Constraint on the kernel.
        bias_constraint: Constraint on the bias.
        normalize: `"both"`, `"input"` or `"kernel"`, the norms divided by.
        response: `"cosine"`, `"linear"`, `"sigmoid"` or `"learnable_sigmoid"`; all but the
            first need `normalize="both"`.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Input shape:
        `(..., features)`.

    Output shape:
        `(..., units)`.

    Raises:
        ValueError: For arguments outside the ranges above, or that do not go together, at
            construction; if the number of features is unknown, at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.SphereDense(10, response="sigmoid")
    >>> outputs = layer(keras.random.normal((4, 32), seed=0))
    >>> tuple(outputs.shape), bool(keras.ops.max(keras.ops.abs(outputs)) <= 1)
    ((4, 10), True)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.1
        ("hyperspherical fully-connected networks"). The responses are those of the
        authors' convolutions.
    """

    def __init__(
        self,
        units: int,
        activation: Any = None,
        use_bias: bool = False,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        normalize: str = "both",
        response: str = "cosine",
        **kwargs: Any,
    ) -> None:
        super().__init__(activity_regularizer=activity_regularizer, **kwargs)
        self.units = validation.positive_integer(units, "units")
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.normalize, self.response = angles.check(normalize, response)
        self.input_spec = keras.layers.InputSpec(min_ndim=2)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        features = validation.known_axis(input_shape, -1, "last axis")
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: features})
        self.kernel = self.add_weight(
            name="kernel",
            shape=(features, self.units),
            initializer=self.kernel_initializer,
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
            autocast=False,
        )
        self.bias = (
            self.add_weight(
                name="bias",
                shape=(self.units,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                constraint=self.bias_constraint,
            )
            if self.use_bias
            else None
        )
        self.curvature = angles.add_curvature(self, self.units, self.response)

    def call(self, inputs: Tensor) -> Tensor:
        inputs = ops.cast(inputs, self.compute_dtype)  # Of integers too.
        kernel = ops.convert_to_tensor(self.kernel)
        outputs = at_least_float32(ops.matmul(inputs, ops.cast(kernel, inputs.dtype)))
        if self.normalize in ("both", "input"):
            outputs = outputs / angles.norm(inputs, axis=-1, keepdims=True)
        if self.normalize in ("both", "kernel"):
            outputs = outputs / angles.norm(kernel, axis=0)
        outputs = angles.respond(outputs, self.response, self.curvature)
        outputs = ops.cast(outputs, self.compute_dtype)
        if self.bias is not None:
            outputs = outputs + ops.cast(self.bias, outputs.dtype)
        return outputs if self.activation is None else self.activation(outputs)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "units": self.units,
            "activation": keras.activations.serialize(self.activation),
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "bias_initializer": keras.initializers.serialize(self.bias_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "bias_regularizer": keras.regularizers.serialize(self.bias_regularizer),
            "activity_regularizer": keras.regularizers.serialize(self.activity_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "bias_constraint": keras.constraints.serialize(self.bias_constraint),
            "normalize": self.normalize,
            "response": self.response,
        }
