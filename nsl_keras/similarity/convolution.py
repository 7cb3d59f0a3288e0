"""Convolutions with a neural similarity: `W^T M x` in place of `W^T x`.

Static `M` is a weight and folds into the kernel; dynamic `M` is predicted from the input,
one matrix per output position.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras.backend.precision import at_least_float32
from nsl_keras.similarity import geometry, matrices
from nsl_keras.similarity.convolution_base import Convolution
from nsl_keras.similarity.predictors import KINDS, SimilarityPredictor

Tensor = Any


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityConv2D(Convolution):
    """2D convolution with a learned or predicted bilinear similarity.

    With default initializers the static layer equals `keras.layers.Conv2D`: `M` starts
    at the identity. For a kernel of `T` taps `t, u` (row-major), channels `c`, filters
    `o`, at output position `p`,

        y[p, o] = sum_c sum_t sum_u W[t, c, o] M[t, u] x[p, u, c] + b[o]

    *Static* (`predictor=None`): `M` is a weight. The layer convolves once with
    `equivalent_kernel`, and `fold()` returns the plain `Conv2D` that computes the same.

    *Dynamic* (with a predictor): `M(p)` is the identity plus what the predictor sees in
    the input at `p`. The layer cannot be folded, and costs more than a convolution: its
    taps are read one by one.

    Args:
        filters: int, the number of output channels.
        kernel_size: int or tuple of 2 ints, height and width of the kernel.
        strides: int or tuple of 2 ints, the strides.
        padding: `"valid"` or `"same"`.
        data_format: `"channels_last"` or `"channels_first"`; defaults to
            `keras.config.image_data_format()`.
        dilation_rate: int or tuple of 2 ints, the dilation; not with strides above 1.
        groups: int, the number of groups the channels are split into; 1 with a predictor.
        activation: Activation function, `None` for none.
        use_bias: bool, whether to add a bias.
        kernel_initializer: Initializer of the kernel.
        bias_initializer: Initializer of the bias.
        kernel_regularizer: Regularizer of the kernel, and of the kernels of a predictor
            given by name.
        bias_regularizer: Regularizer of the bias.
        activity_regularizer: Regularizer of the output.
        kernel_constraint: Constraint on the kernel.
        bias_constraint: Constraint on the bias.
        similarity: `"diagonal"` (DNS, `T` parameters), `"unconstrained"` (UNS, `T^2`),
            or a `nsl_keras.similarities.Similarity`.
        similarity_initializer: Initializer of the static matrix `M`, called with the
            shape `(T, T)`; each kind of similarity takes its parameters from it (the
            diagonal, say).
        similarity_regularizer: Regularizer of the static similarity's parameters.
        similarity_constraint: Constraint on the static similarity's parameters.
        predictor: `None` for static; `"sphere"`, `"full_sphere"`, `"cnn"`, or a layer
            that maps the input to `(batch, *output positions, similarity parameters)`,
            such as a `SimilarityPredictor` with this layer's geometry, which is also the
            way to other batch norm momenta or widths.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Call arguments:
        inputs: Tensor of rank 4.
        training: bool, passed to the predictor (batch norm).

    Input shape:
        `(batch, height, width, channels)` with `data_format="channels_last"`,
        `(batch, channels, height, width)` with `"channels_first"`.

    Output shape:
        `(batch, new_height, new_width, filters)` or
        `(batch, filters, new_height, new_width)`.

    Raises:
        ValueError: For arguments outside the ranges above, for `groups` above 1 or static
            similarity arguments with a predictor, at construction; for an input of the
            wrong rank or channel count, or smaller than the kernel, or a predictor with
            another output shape, at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> images = keras.random.normal((2, 8, 8, 3), seed=0)
    >>> static = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, padding="same")
    >>> tuple(static(images).shape)
    (2, 8, 8, 4)
    >>> plain = static.fold()
    >>> difference = keras.ops.max(keras.ops.abs(plain(images) - static(images)))
    >>> type(plain).__name__, bool(difference < 1e-6)
    ('Conv2D', True)
    >>> dynamic = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, predictor="sphere")
    >>> tuple(dynamic(images).shape)
    (2, 6, 6, 4)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019): Section 3.1, Eq. (2);
        static, Section 3.2; dynamic, Section 3.3, Eq. (3). `W^T M x` is the paper's
        order; the authors' code multiplies the same way. Like that code, and unlike the
        paper's Appendix A, the unconstrained dynamic similarity adds the identity.
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
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        similarity: Any = "diagonal",
        similarity_initializer: Any = "identity",
        similarity_regularizer: Any = None,
        similarity_constraint: Any = None,
        predictor: Any = None,
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
            kernel_initializer=kernel_initializer,
            bias_initializer=bias_initializer,
            kernel_regularizer=kernel_regularizer,
            bias_regularizer=bias_regularizer,
            activity_regularizer=activity_regularizer,
            kernel_constraint=kernel_constraint,
            bias_constraint=bias_constraint,
            **kwargs,
        )
        self.similarity = matrices.get(similarity)
        self.similarity_initializer = keras.initializers.get(similarity_initializer)
        self.similarity_regularizer = keras.regularizers.get(similarity_regularizer)
        self.similarity_constraint = keras.constraints.get(similarity_constraint)
        self.predictor = self._resolve_predictor(predictor)

    def _resolve_predictor(self, predictor: Any) -> keras.layers.Layer | None:
        if predictor is None:
            return None
        if isinstance(predictor, dict):
            predictor = keras.saving.deserialize_keras_object(predictor)
        if self.groups != 1:
            raise ValueError(
                "`groups` must be 1 with a predictor. "
                f"Received: groups={self.groups}, predictor={predictor!r}"
            )
        if self.similarity_regularizer or self.similarity_constraint:
            raise ValueError(
                "`similarity_regularizer` and `similarity_constraint` apply to a "
                "static similarity and must be None with a predictor. Received: "
                f"similarity_regularizer={self.similarity_regularizer}, "
                f"similarity_constraint={self.similarity_constraint}"
            )
        if not isinstance(self.similarity_initializer, keras.initializers.Identity):
            raise ValueError(
                "`similarity_initializer` applies to a static similarity and must be "
                "'identity' with a predictor. Received: "
                f"similarity_initializer={self.similarity_initializer}"
            )
        if isinstance(predictor, keras.layers.Layer):
            return predictor
        if predictor not in KINDS:
            names = ", ".join(repr(kind) for kind in KINDS)
            raise ValueError(
                f"`predictor` must be None, one of {names}, or a layer. "
                f"Received: predictor={predictor!r}"
            )
        return SimilarityPredictor(
            self.kernel_size,
            kind=predictor,
            similarity=self.similarity,
            strides=self.strides,
            padding=self.padding,
            data_format=self.data_format,
            dilation_rate=self.dilation_rate,
            kernel_regularizer=self.kernel_regularizer,
            dtype=self.dtype_policy,
            name="predictor",
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        super().build(input_shape)
        if self.predictor is None:
            self.similarity_parameters = self.add_weight(
                name="similarity",
                shape=self.similarity.parameter_shape(self.taps),
                initializer=self._initial_parameters,
                regularizer=self.similarity_regularizer,
                constraint=self.similarity_constraint,
                autocast=False,
            )
        else:
            if not self.predictor.built:
                self.predictor.build(input_shape)
            self._check_prediction_shape(self.predictor, input_shape)

    def _initial_parameters(self, shape: tuple[int, ...], dtype: Any) -> Tensor:
        del shape  # That of the similarity's parameters, which is checked below.
        matrix = self.similarity_initializer((self.taps, self.taps), dtype=dtype)
        return self._parameters_from(matrix)

    def _parameters_from(self, matrix: Tensor) -> Tensor:
        parameters = ops.cast(self.similarity.parameters_from(matrix), self.variable_dtype)
        expected = tuple(self.similarity.parameter_shape(self.taps))
        if tuple(parameters.shape) != expected:
            raise ValueError(
                "`similarity.parameters_from` must return the shape that "
                f"`similarity.parameter_shape` names, {expected}. "
                f"Received: shape {tuple(parameters.shape)} from {self.similarity!r}"
            )
        return parameters

    def _check_prediction_shape(
        self, predictor: keras.layers.Layer, input_shape: tuple[int | None, ...]
    ) -> None:
        outputs = 1
        for size in self.similarity.parameter_shape(self.taps):
            outputs *= size
        positions = self.compute_output_shape(input_shape)
        expected = (
            (*positions[:-1], outputs)
            if self.data_format == "channels_last"
            else (positions[0], outputs, *positions[2:])
        )
        received = tuple(predictor.compute_output_shape(input_shape))
        if received != expected:
            raise ValueError(
                "`predictor` must map the input to one set of similarity parameters "
                f"per output position, of shape {expected} for the input shape "
                f"{tuple(input_shape)}. Received: an output of shape {received}"
            )

    @property
    def equivalent_kernel(self) -> Tensor:
        """The kernel `W^[u,c,o] = sum_t W[t,c,o] M[t,u]`, in the shape of `kernel`.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        self._require_static("equivalent_kernel")
        kernel = ops.convert_to_tensor(self.kernel)
        taps_first = ops.reshape(kernel, (self.taps, *kernel.shape[-2:]))
        equivalent = self.similarity.equivalent_kernel(
            ops.convert_to_tensor(self.similarity_parameters), taps_first
        )
        return ops.reshape(equivalent, kernel.shape)

    def fold(self) -> keras.layers.Conv2D:
        """Returns a new plain `keras.layers.Conv2D` that computes the same.

        This layer stays as it is, and the two share no weights.

        Raises:
            ValueError: If the layer is dynamic, or not built yet.
        """
        self._require_static("fold")
        config = super().get_config()
        plain = keras.layers.Conv2D.from_config(config)
        input_channels = self.kernel.shape[-2] * self.groups
        shape: list[int | None] = [None] * (self.rank + 2)
        shape[self.channel_axis] = input_channels
        plain.build(tuple(shape))
        plain.kernel.assign(self.equivalent_kernel)
        if self.bias is not None:
            # A copy: on JAX the two would share a buffer, which training gives away.
            plain.bias.assign(ops.convert_to_numpy(self.bias.value))
        return plain

    def _require_static(self, what: str) -> None:
        if self.predictor is not None:
            raise ValueError(
                f"`{what}` needs a static similarity: layer {self.name!r} predicts its "
                "similarity from the input. Received: "
                f"predictor={self.predictor.name!r}"
            )
        if not self.built:
            raise ValueError(
                f"`{what}` needs a built layer. Call layer {self.name!r} on data, or "
                "its `build(input_shape)`, first."
            )

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        self.compute_output_shape(inputs.shape)  # Raises for images that are too small.
        if self.predictor is None:
            outputs = self.convolve(inputs, self.equivalent_kernel)
        else:
            prediction = self.predictor(inputs, training=training)
            outputs = self._compare_at_positions(inputs, prediction)
        return self.add_bias_and_activate(outputs)

    def _compare_at_positions(self, inputs: Tensor, prediction: Tensor) -> Tensor:
        """Returns `W^T M(p) x_p` for the predicted parameters at every position."""
        if self.data_format == "channels_first":
            inputs = ops.moveaxis(inputs, 1, -1)
            prediction = ops.moveaxis(prediction, 1, -1)
        identity = self._parameters_from(ops.eye(self.taps, dtype=self.variable_dtype))
        positions = ops.shape(prediction)[:-1]
        parameters = ops.cast(
            at_least_float32(ops.reshape(prediction, (*positions, *identity.shape)))
            + identity,
            inputs.dtype,
        )
        patches = geometry.patches(
            inputs, self.kernel_size, self.strides, self.padding, self.dilation_rate
        )
        compared = self.similarity.compare(parameters, patches)
        features = self.taps * inputs.shape[-1]
        # A 1x1 convolution: the same product as a matmul, and several times faster than
        # it on a CPU without XLA.
        outputs = ops.conv(
            ops.reshape(compared, (*positions, features)),
            ops.cast(
                ops.reshape(self.kernel, (1,) * self.rank + (features, self.filters)),
                inputs.dtype,
            ),
            data_format="channels_last",
        )
        if self.data_format == "channels_first":
            outputs = ops.moveaxis(outputs, -1, 1)
        return outputs

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "similarity": matrices.serialize(self.similarity),
            "similarity_initializer": keras.initializers.serialize(
                self.similarity_initializer
            ),
            "similarity_regularizer": keras.regularizers.serialize(
                self.similarity_regularizer
            ),
            "similarity_constraint": keras.constraints.serialize(
                self.similarity_constraint
            ),
            "predictor": keras.saving.serialize_keras_object(self.predictor),
        }
