"""Convolutions with a neural similarity: `W^T M x` in place of `W^T x`.

Static `M` is a weight and folds into the kernel; dynamic `M` is predicted from the input,
one matrix per output position, or one per example. The layers are Keras's own, with another
`call`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from nsl_keras.backend import Tensor
from nsl_keras.similarity import matrices, predictors
from nsl_keras.similarity.dynamic_convolution import (
    TOO_SMALL,
    add_bias_and_activate,
    convolve,
    convolve_depthwise,
    dynamic_convolution,
    dynamic_depthwise_convolution,
)
from nsl_keras.similarity.neural_similarity import NeuralSimilarity


class SimilarityConvolution(NeuralSimilarity):
    """Private mixin, in front of one of Keras's convolutions."""

    # The two ways to compute, which the depthwise layer replaces.
    _static: Callable[[Any, Tensor, Tensor], Tensor] = staticmethod(convolve)
    _dynamic: Callable[..., Tensor] = staticmethod(dynamic_convolution)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.predictor is not None and getattr(self, "groups", 1) != 1:
            raise ValueError(
                "`groups` must be 1 with a predictor. "
                f"Received: groups={self.groups}, predictor={kwargs['predictor']!r}"
            )

    def _get_predictor(self, predictor: Any) -> keras.layers.Layer | None:
        return predictors.get(predictor, kernel_regularizer=self.kernel_regularizer)

    @property
    def taps(self) -> int:
        """Number of taps `T`, the product of `kernel_size`."""
        return math.prod(self.kernel_size)

    def _kernel_grid(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[tuple[int, ...], int]:
        del input_shape
        return tuple(self.kernel_size), self.kernel.shape[-2]

    def _prediction_shapes(
        self, input_shape: tuple[int | None, ...], outputs: int
    ) -> list[tuple[int | None, ...]]:
        at_positions = list(self.compute_output_shape(input_shape))
        at_positions[self.channel_axis] = outputs
        return [tuple(at_positions), (input_shape[0], outputs)]

    def equivalent(self, kernel: Tensor) -> Tensor:
        taps = ops.reshape(kernel, (-1, *kernel.shape[-2:]))
        if self.learn_shape:
            taps = self._trained_shape()[:, None, None] * taps  # NSL Eq. (4)
        parameters = ops.convert_to_tensor(self.similarity_parameters)
        equivalent = self._structure.equivalent_kernel(parameters, taps)
        return ops.reshape(equivalent, kernel.shape)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        # Of inputs that are too small TensorFlow's convolution returns uninitialized memory
        # (2.21, on a CPU). Keras raises; older versions let zero positions pass.
        if 0 in self.compute_output_shape(tuple(inputs.shape))[1:]:
            raise ValueError(TOO_SMALL.format(self.kernel_size, tuple(inputs.shape)))
        inputs = ops.cast(inputs, self.compute_dtype)  # Of integers too.
        kernel = ops.convert_to_tensor(self.kernel)
        if self.predictor is None:
            outputs = self._static(self, inputs, self.equivalent(kernel))
            return add_bias_and_activate(self, outputs)
        parameters = self._predicted_parameters(inputs, training)
        if self.learn_shape:
            shape = (*self.kernel_size, 1, 1)
            kernel = ops.reshape(self._trained_shape(), shape) * kernel  # NSL Eq. (4)
        outputs = self._dynamic(
            ops.moveaxis(inputs, self.channel_axis, -1),
            kernel,
            functools.partial(self._structure.compare_windows, parameters),
            strides=self.strides,
            padding=self.padding,
            dilation_rate=self.dilation_rate,
        )
        outputs = ops.moveaxis(outputs, -1, self.channel_axis)
        return add_bias_and_activate(self, outputs)

    def _predicted_parameters(self, inputs: Tensor, training: bool | None) -> Tensor:
        """Returns the parameters of `M` at every position, on the last axis."""
        adapted = inputs if self.adaptation is None else self.adaptation(inputs)
        prediction = self.predictor(adapted, training=training)
        if len(prediction.shape) == 2:
            # One `M` an example, for all positions.
            shape = (ops.shape(prediction)[0], *[1] * self.rank, prediction.shape[1])
            prediction = ops.reshape(prediction, shape)
        elif self.channel_axis == 1:
            prediction = ops.moveaxis(prediction, 1, -1)
        return matrices.around(self._identity, prediction, self.compute_dtype)

    def predicted_matrices(self, inputs: Tensor) -> Tensor:
        """Returns the `M` that a dynamic layer predicts at each position of its output.

        Args:
            inputs: Batch of the layer's inputs.

        Returns:
            Tensor of shape `(batch, *positions, T, T)`; every size of `positions` is 1 with
            a pooled predictor. The kernel's shape, where it is learned, is not part of it.

        Raises:
            ValueError: If the layer is static.
        """
        if self.predictor is None:
            raise ValueError(
                "`predicted_matrices` needs a dynamic similarity: layer "
                f"{self.name!r} has a static one, `similarity_matrix`. "
                "Received: predictor=None"
            )
        inputs = ops.cast(inputs, self.compute_dtype)
        if not self.built:
            self.build(inputs.shape)
        return self._structure.matrix(self._predicted_parameters(inputs, training=False))


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityConv1D(SimilarityConvolution, keras.layers.Conv1D):
    """1D convolution with a learned or predicted bilinear similarity.

    The temporal twin of `NeuralSimilarityConv2D`: for taps `t, u`, channels `c`, filters
    `o`, at output position `p`,

        y[p, o] = sum_c sum_t sum_u W[t, c, o] M[t, u] x[p, u, c] + b[o]

    With default initializers the static layer equals `keras.layers.Conv1D`, and `fold()`
    returns one. A causal layer's predictor is causal too.

    Args:
        Those of `keras.layers.Conv1D`, and:
        similarity: `"diagonal"` (DNS, `T` parameters), `"unconstrained"` (UNS, `T^2`),
            `"symmetric"`, `"positive_semidefinite"`, `"sparse"`, `"full"`, or a
            `nsl_keras.similarities.Similarity`.
        similarity_initializer: Initializer of the static matrix `M`, called with its
            shape `(T, T)`; each kind of similarity takes its parameters from it (the
            diagonal, the Cholesky factor, ...).
        similarity_regularizer: Regularizer of the static similarity's parameters, which it
            draws to zero, not to the identity; `"l1"` makes them sparse softly.
        similarity_constraint: Constraint on the static similarity's parameters.
        predictor: `None` for static; `"sphere"`, `"full_sphere"`, `"cnn"`, or a name of
            your own from `nsl_keras.predictors.register`, regularized as the kernel is; or
            a layer that maps the input to the parameters of `M`, either at every output
            position or one set per example: a `SimilarityPredictor` (the way to other
            widths, or batch norm momenta), a `SharedSimilarityPredictor`, or your own. Not
            with `groups` above 1.
        learn_shape: bool, whether to learn which taps the kernel has: `M = D R`, with a
            Boolean diagonal `D` and `R` of the kind `similarity`, learned or predicted.
            `learned_shape` returns `D`.
        shape_threshold: float in [0, 1), the threshold that a tap's real-valued parameter,
            starting at 1, must exceed for the tap to live.
        kernel_trainable: bool, whether kernel and bias are trained besides the similarity.

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
            at construction; for a predictor with another geometry or output shape, at
            build; for what `keras.layers.Conv1D` refuses; for LoRA and quantized
            policies.

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


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityConv2D(SimilarityConvolution, keras.layers.Conv2D):
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
        Those of `keras.layers.Conv2D`, and:
        similarity: `"diagonal"` (DNS, `T` parameters), `"unconstrained"` (UNS, `T^2`),
            `"symmetric"`, `"positive_semidefinite"`, `"sparse"`, `"full"`, or a
            `nsl_keras.similarities.Similarity`.
        similarity_initializer: Initializer of the static matrix `M`, called with its
            shape `(T, T)`; each kind of similarity takes its parameters from it (the
            diagonal, the Cholesky factor, ...).
        similarity_regularizer: Regularizer of the static similarity's parameters, which it
            draws to zero, not to the identity; `"l1"` makes them sparse softly.
        similarity_constraint: Constraint on the static similarity's parameters.
        predictor: `None` for static; `"sphere"`, `"full_sphere"`, `"cnn"`, or a name of
            your own from `nsl_keras.predictors.register`, regularized as the kernel is; or
            a layer that maps the input to the parameters of `M`, either at every output
            position or one set per example: a `SimilarityPredictor` (the way to other
            widths, or batch norm momenta), a `SharedSimilarityPredictor`, or your own. Not
            with `groups` above 1.
        learn_shape: bool, whether to learn which taps the kernel has: `M = D R`, with a
            Boolean diagonal `D` and `R` of the kind `similarity`, learned or predicted.
            `learned_shape` returns `D`.
        shape_threshold: float in [0, 1), the threshold that a tap's real-valued parameter,
            starting at 1, must exceed for the tap to live.
        kernel_trainable: bool, whether kernel and bias are trained besides the similarity.

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
            at construction; for a predictor with another geometry or output shape, at
            build; for what `keras.layers.Conv2D` refuses; for LoRA and quantized
            policies.

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


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityConv3D(SimilarityConvolution, keras.layers.Conv3D):
    """3D convolution with a learned or predicted bilinear similarity.

    The volumetric twin of `NeuralSimilarityConv2D`: for taps `t, u` (row-major over depth,
    height and width), channels `c`, filters `o`, at output position `p`,

        y[p, o] = sum_c sum_t sum_u W[t, c, o] M[t, u] x[p, u, c] + b[o]

    With default initializers the static layer equals `keras.layers.Conv3D`, and `fold()`
    returns one. A 3x3x3 kernel has 27 taps: a dynamic unconstrained `M` has 729 entries
    at every position.

    Args:
        Those of `keras.layers.Conv3D`, and:
        similarity: `"diagonal"` (DNS, `T` parameters), `"unconstrained"` (UNS, `T^2`),
            `"symmetric"`, `"positive_semidefinite"`, `"sparse"`, `"full"`, or a
            `nsl_keras.similarities.Similarity`.
        similarity_initializer: Initializer of the static matrix `M`, called with its
            shape `(T, T)`; each kind of similarity takes its parameters from it (the
            diagonal, the Cholesky factor, ...).
        similarity_regularizer: Regularizer of the static similarity's parameters, which it
            draws to zero, not to the identity; `"l1"` makes them sparse softly.
        similarity_constraint: Constraint on the static similarity's parameters.
        predictor: `None` for static; `"sphere"`, `"full_sphere"`, `"cnn"`, or a name of
            your own from `nsl_keras.predictors.register`, regularized as the kernel is; or
            a layer that maps the input to the parameters of `M`, either at every output
            position or one set per example: a `SimilarityPredictor` (the way to other
            widths, or batch norm momenta), a `SharedSimilarityPredictor`, or your own. Not
            with `groups` above 1.
        learn_shape: bool, whether to learn which taps the kernel has: `M = D R`, with a
            Boolean diagonal `D` and `R` of the kind `similarity`, learned or predicted.
            `learned_shape` returns `D`.
        shape_threshold: float in [0, 1), the threshold that a tap's real-valued parameter,
            starting at 1, must exceed for the tap to live.
        kernel_trainable: bool, whether kernel and bias are trained besides the similarity.

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
            at construction; for a predictor with another geometry or output shape, at
            build; for what `keras.layers.Conv3D` refuses; for LoRA and quantized
            policies.

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


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityDepthwiseConv2D(SimilarityConvolution, keras.layers.DepthwiseConv2D):
    """2D depthwise convolution with a learned or predicted bilinear similarity.

    Every input channel is convolved on its own, and all of them share one `M`. For taps
    `t, u`, input channels `c` and the `m`-th filter of a channel, at output position `p`,

        y[p, (c, m)] = sum_t sum_u W[t, c, m] M[t, u] x[p, u, c] + b[(c, m)]

    With default initializers the static layer equals `keras.layers.DepthwiseConv2D`, and
    `fold()` returns one; with a predictor, `M(p)` is the identity plus what the predictor
    sees in the input at `p`.

    Args:
        Those of `keras.layers.DepthwiseConv2D`, and:
        similarity: `"diagonal"` (DNS, `T` parameters), `"unconstrained"` (UNS, `T^2`),
            `"symmetric"`, `"positive_semidefinite"`, `"sparse"`, or a
            `nsl_keras.similarities.Similarity` whose `M` all channels share.
        similarity_initializer: Initializer of the static matrix `M`, called with its
            shape `(T, T)`; each kind of similarity takes its parameters from it.
        similarity_regularizer: Regularizer of the static similarity's parameters.
        similarity_constraint: Constraint on the static similarity's parameters.
        predictor: `None` for static, or a predictor as for `NeuralSimilarityConv2D`; given
            by name it is regularized as the kernel is.
        learn_shape: bool, whether to learn which taps the kernel has, as in
            `NeuralSimilarityConv2D`.
        shape_threshold: float in [0, 1), the threshold that a tap's real-valued parameter,
            starting at 1, must exceed for the tap to live.
        kernel_trainable: bool, whether kernel and bias are trained besides the similarity.

    Call arguments:
        inputs: Tensor of rank 4.
        training: bool, passed to the predictor (batch norm).

    Input shape:
        `(batch, height, width, channels)` with `data_format="channels_last"`,
        `(batch, channels, height, width)` with `"channels_first"`.

    Output shape:
        `(batch, new_height, new_width, channels * depth_multiplier)` or
        `(batch, channels * depth_multiplier, new_height, new_width)`.

    Raises:
        ValueError: For arguments outside the ranges above, for `similarity="full"` (it
            would mix the channels), for static similarity arguments or a static kind with
            a predictor, at construction; for a predictor with another geometry or output
            shape, at build; for what `keras.layers.DepthwiseConv2D` refuses; for quantized
            policies.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityDepthwiseConv2D(3, padding="same")
    >>> tuple(layer(keras.ops.ones((2, 8, 8, 4))).shape)
    (2, 8, 8, 4)
    >>> type(layer.fold()).__name__
    'DepthwiseConv2D'

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Sections 3.1 to 3.5. The
        paper treats full convolutions; with blocks shared by all channels (Eq. 2) its
        similarity carries over to depthwise ones as it is.
    """

    _static = staticmethod(convolve_depthwise)
    _dynamic = staticmethod(dynamic_depthwise_convolution)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.similarity.shared_by_channels:
            raise ValueError(
                "`similarity` must be shared by all channels in a depthwise convolution. "
                f"Received: similarity={type(self.similarity).__name__!r}"
            )

    def _get_predictor(self, predictor: Any) -> keras.layers.Layer | None:
        return predictors.get(predictor, kernel_regularizer=self.depthwise_regularizer)

    @property
    def plain_width(self) -> int:
        return math.prod(self.kernel.shape[-2:])
