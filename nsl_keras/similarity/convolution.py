"""Convolutions with a neural similarity: `W^T M x` in place of `W^T x`.

Static `M` is a weight and folds into the kernel; dynamic `M` is predicted from the input,
one matrix per output position, or one per example. The three public layers differ in the
number of their spatial axes alone.
"""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras.backend import Tensor
from nsl_keras.similarity.convolution_base import Convolution
from nsl_keras.similarity.dynamic_convolution import dynamic_convolution
from nsl_keras.similarity.similarity_window import SimilarityWindow


class NeuralSimilarityConvolution(SimilarityWindow, Convolution):
    """Private base: the neural similarity convolution of `rank` spatial axes."""

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
        learn_shape: bool = False,
        shape_threshold: float = 0.5,
        kernel_trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        Convolution.__init__(
            self,
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
        if predictor is not None and self.groups != 1:
            raise ValueError(
                "`groups` must be 1 with a predictor. "
                f"Received: groups={groups}, predictor={predictor!r}"
            )
        self._store_similarity(
            similarity=similarity,
            similarity_initializer=similarity_initializer,
            similarity_regularizer=similarity_regularizer,
            similarity_constraint=similarity_constraint,
            predictor=predictor,
            learn_shape=learn_shape,
            shape_threshold=shape_threshold,
            kernel_trainable=kernel_trainable,
        )

    def _predictor_kernel_regularizer(self) -> Any:
        return self.kernel_regularizer

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        Convolution.build(self, input_shape)
        self._build_similarity(self.kernel_size, self.kernel.shape[-2])
        self._build_predictor(input_shape)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        self.compute_output_shape(inputs.shape)  # Raises for inputs that are too small.
        if self.predictor is None:
            outputs = self.convolve(inputs, self.equivalent_kernel)
        else:
            outputs = self._compare_at_positions(inputs, self._predict(inputs, training))
        return self.add_bias_and_activate(outputs)

    def _compare(self, inputs: Tensor, kernel: Tensor, parameters: Tensor) -> Tensor:
        return dynamic_convolution(
            inputs,
            kernel,
            parameters,
            self._structure,
            strides=self.strides,
            padding=self.padding,
            dilation_rate=self.dilation_rate,
        )

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self._similarity_config()}


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityConv1D(NeuralSimilarityConvolution):
    """1D convolution with a learned or predicted bilinear similarity.

    The temporal twin of `NeuralSimilarityConv2D`: for taps `t, u`, channels `c`, filters
    `o`, at output position `p`,

        y[p, o] = sum_c sum_t sum_u W[t, c, o] M[t, u] x[p, u, c] + b[o]

    With default initializers the static layer equals `keras.layers.Conv1D`, and `fold()`
    returns one. A causal layer's predictor is causal too.

    Args:
        filters: int, the number of output channels.
        kernel_size: int or tuple of 1 int, the length of the kernel.
        strides: int or tuple of 1 int, the stride.
        padding: `"valid"`, `"same"`, or `"causal"`: zeros before the input alone, so that
            no output depends on later inputs.
        data_format: `"channels_last"` or `"channels_first"`; defaults to
            `keras.config.image_data_format()`.
        dilation_rate: int or tuple of 1 int, the dilation; not with a stride above 1.
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
            `"symmetric"`, `"positive_semidefinite"`, `"sparse"`, `"full"`, or a
            `nsl_keras.similarities.Similarity`.
        similarity_initializer: Initializer of the static matrix `M`, called with its
            shape `(T, T)`; each kind of similarity takes its parameters from it (the
            diagonal, the Cholesky factor, ...).
        similarity_regularizer: Regularizer of the static similarity's parameters; `"l1"`
            makes them sparse softly.
        similarity_constraint: Constraint on the static similarity's parameters.
        predictor: `None` for static; `"sphere"`, `"full_sphere"`, `"cnn"`, or a layer
            that maps the input to the parameters of `M`, either at every output position
            or one set per example: a `SimilarityPredictor` with this layer's geometry
            (the way to other widths, or batch norm momenta), a
            `SharedSimilarityPredictor`, or your own.
        learn_shape: bool, whether to learn which taps the kernel has: `M = D R`, with a
            Boolean diagonal `D` and `R` of the kind `similarity`, learned or predicted.
            `learned_shape` returns `D`.
        shape_threshold: float in [0, 1), the threshold that a tap's real-valued parameter,
            starting at 1, must exceed for the tap to live.
        kernel_trainable: bool, whether kernel and bias are trained besides the similarity.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Call arguments:
        inputs: Tensor of rank 3.
        training: bool, passed to the predictor (batch norm).

    Input shape:
        `(batch, steps, channels)` with `data_format="channels_last"`,
        `(batch, channels, steps)` with `"channels_first"`.

    Output shape:
        `(batch, new_steps, filters)` or `(batch, filters, new_steps)`.

    Raises:
        ValueError: For arguments outside the ranges above, for `groups` above 1, static
            similarity arguments or a static kind (`"sparse"`, `"full"`) with a predictor,
            at construction; for an input of the wrong rank or channel count, or smaller
            than the kernel, or a predictor with another output shape, at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityConv1D(4, 3, padding="causal")
    >>> tuple(layer(keras.ops.ones((2, 10, 3))).shape)
    (2, 10, 4)
    >>> type(layer.fold()).__name__
    'Conv1D'

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Sections 3.1 to 3.5. The
        paper treats images; one axis is this package's extension.
    """

    rank = 1
    plain = keras.layers.Conv1D


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityConv2D(NeuralSimilarityConvolution):
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
            `"symmetric"`, `"positive_semidefinite"`, `"sparse"`, `"full"`, or a
            `nsl_keras.similarities.Similarity`.
        similarity_initializer: Initializer of the static matrix `M`, called with its
            shape `(T, T)`; each kind of similarity takes its parameters from it (the
            diagonal, the Cholesky factor, ...).
        similarity_regularizer: Regularizer of the static similarity's parameters; `"l1"`
            makes them sparse softly.
        similarity_constraint: Constraint on the static similarity's parameters.
        predictor: `None` for static; `"sphere"`, `"full_sphere"`, `"cnn"`, or a layer
            that maps the input to the parameters of `M`, either at every output position
            or one set per example: a `SimilarityPredictor` with this layer's geometry
            (the way to other widths, or batch norm momenta), a
            `SharedSimilarityPredictor`, or your own.
        learn_shape: bool, whether to learn which taps the kernel has: `M = D R`, with a
            Boolean diagonal `D` and `R` of the kind `similarity`, learned or predicted.
            `learned_shape` returns `D`.
        shape_threshold: float in [0, 1), the threshold that a tap's real-valued parameter,
            starting at 1, must exceed for the tap to live.
        kernel_trainable: bool, whether kernel and bias are trained besides the similarity.
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
        ValueError: For arguments outside the ranges above, for `groups` above 1, static
            similarity arguments or a static kind (`"sparse"`, `"full"`) with a predictor,
            at construction; for an input of the wrong rank or channel count, or smaller
            than the kernel, or a predictor with another output shape, at build.

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
        Neural Similarity Learning (Liu et al., NeurIPS 2019): Section 3.1, Eqs. (1) and
        (2); static, Section 3.2; dynamic, Section 3.3, Eq. (3); kernel shape, Section
        3.5, Eqs. (4) and (5). `W^T M x` is the paper's
        order; the authors' code multiplies the same way. Like that code, and unlike the
        paper's Appendix A, the unconstrained dynamic similarity adds the identity.
    """

    rank = 2
    plain = keras.layers.Conv2D


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityConv3D(NeuralSimilarityConvolution):
    """3D convolution with a learned or predicted bilinear similarity.

    The volumetric twin of `NeuralSimilarityConv2D`: for taps `t, u` (row-major over depth,
    height and width), channels `c`, filters `o`, at output position `p`,

        y[p, o] = sum_c sum_t sum_u W[t, c, o] M[t, u] x[p, u, c] + b[o]

    With default initializers the static layer equals `keras.layers.Conv3D`, and `fold()`
    returns one. A 3x3x3 kernel has 27 taps: a dynamic unconstrained `M` has 729 entries
    at every position.

    Args:
        filters: int, the number of output channels.
        kernel_size: int or tuple of 3 ints, depth, height and width of the kernel.
        strides: int or tuple of 3 ints, the strides.
        padding: `"valid"` or `"same"`.
        data_format: `"channels_last"` or `"channels_first"`; defaults to
            `keras.config.image_data_format()`.
        dilation_rate: int or tuple of 3 ints, the dilation; not with strides above 1.
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
            `"symmetric"`, `"positive_semidefinite"`, `"sparse"`, `"full"`, or a
            `nsl_keras.similarities.Similarity`.
        similarity_initializer: Initializer of the static matrix `M`, called with its
            shape `(T, T)`; each kind of similarity takes its parameters from it (the
            diagonal, the Cholesky factor, ...).
        similarity_regularizer: Regularizer of the static similarity's parameters; `"l1"`
            makes them sparse softly.
        similarity_constraint: Constraint on the static similarity's parameters.
        predictor: `None` for static; `"sphere"`, `"full_sphere"`, `"cnn"`, or a layer
            that maps the input to the parameters of `M`, either at every output position
            or one set per example: a `SimilarityPredictor` with this layer's geometry
            (the way to other widths, or batch norm momenta), a
            `SharedSimilarityPredictor`, or your own.
        learn_shape: bool, whether to learn which taps the kernel has: `M = D R`, with a
            Boolean diagonal `D` and `R` of the kind `similarity`, learned or predicted.
            `learned_shape` returns `D`.
        shape_threshold: float in [0, 1), the threshold that a tap's real-valued parameter,
            starting at 1, must exceed for the tap to live.
        kernel_trainable: bool, whether kernel and bias are trained besides the similarity.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Call arguments:
        inputs: Tensor of rank 5.
        training: bool, passed to the predictor (batch norm).

    Input shape:
        `(batch, depth, height, width, channels)` with `data_format="channels_last"`,
        `(batch, channels, depth, height, width)` with `"channels_first"`.

    Output shape:
        `(batch, new_depth, new_height, new_width, filters)` or
        `(batch, filters, new_depth, new_height, new_width)`.

    Raises:
        ValueError: For arguments outside the ranges above, for `groups` above 1, static
            similarity arguments or a static kind (`"sparse"`, `"full"`) with a predictor,
            at construction; for an input of the wrong rank or channel count, or smaller
            than the kernel, or a predictor with another output shape, at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityConv3D(4, 3, similarity="symmetric")
    >>> tuple(layer(keras.ops.ones((2, 5, 5, 5, 3))).shape)
    (2, 3, 3, 3, 4)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Sections 3.1 to 3.5. The
        paper treats images; three axes are this package's extension.
    """

    rank = 3
    plain = keras.layers.Conv3D
