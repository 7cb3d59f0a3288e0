"""Depthwise convolution with a neural similarity."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity.dynamic_convolution import dynamic_depthwise_convolution
from nsl_keras.similarity.similarity_window import SimilarityWindow


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityDepthwiseConv2D(SimilarityWindow):
    """2D depthwise convolution with a learned or predicted bilinear similarity.

    Every input channel is convolved on its own, and all of them share one `M`. For taps
    `t, u`, input channels `c` and the `m`-th filter of a channel, at output position `p`,

        y[p, (c, m)] = sum_t sum_u W[t, c, m] M[t, u] x[p, u, c] + b[(c, m)]

    With default initializers the static layer equals `keras.layers.DepthwiseConv2D`, and
    `fold()` returns one; with a predictor, `M(p)` is the identity plus what the predictor
    sees in the input at `p`.

    Args:
        kernel_size: int or tuple of 2 ints, height and width of the kernel.
        strides: int or tuple of 2 ints, the strides; TensorFlow wants them equal.
        padding: `"valid"` or `"same"`.
        depth_multiplier: int, the number of filters, and of output channels, per input
            channel.
        data_format: `"channels_last"` or `"channels_first"`; defaults to
            `keras.config.image_data_format()`.
        dilation_rate: int or tuple of 2 ints, the dilation; not with strides above 1.
        activation: Activation function, `None` for none.
        use_bias: bool, whether to add a bias.
        depthwise_initializer: Initializer of the kernel.
        bias_initializer: Initializer of the bias.
        depthwise_regularizer: Regularizer of the kernel, and of the kernels of a predictor
            given by name.
        bias_regularizer: Regularizer of the bias.
        activity_regularizer: Regularizer of the output.
        depthwise_constraint: Constraint on the kernel.
        bias_constraint: Constraint on the bias.
        similarity: `"diagonal"` (DNS, `T` parameters), `"unconstrained"` (UNS, `T^2`),
            `"symmetric"`, `"positive_semidefinite"`, `"sparse"`, or a
            `nsl_keras.similarities.Similarity` whose `M` all channels share.
        similarity_initializer: Initializer of the static matrix `M`, called with its
            shape `(T, T)`; each kind of similarity takes its parameters from it.
        similarity_regularizer: Regularizer of the static similarity's parameters.
        similarity_constraint: Constraint on the static similarity's parameters.
        predictor: `None` for static, or a predictor as for `NeuralSimilarityConv2D`.
        learn_shape: bool, whether to learn which taps the kernel has, as in
            `NeuralSimilarityConv2D`.
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
        `(batch, new_height, new_width, channels * depth_multiplier)` or
        `(batch, channels * depth_multiplier, new_height, new_width)`.

    Raises:
        ValueError: For arguments outside the ranges above, for `similarity="full"` (it
            would mix the channels), for static similarity arguments or a static kind with
            a predictor, at construction; for an input of the wrong rank or channel count,
            or smaller than the kernel, or a predictor with another output shape, at build.

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

    rank = 2
    plain = keras.layers.DepthwiseConv2D

    def __init__(
        self,
        kernel_size: int | tuple[int, ...],
        strides: int | tuple[int, ...] = 1,
        padding: str = "valid",
        depth_multiplier: int = 1,
        data_format: str | None = None,
        dilation_rate: int | tuple[int, ...] = 1,
        activation: Any = None,
        use_bias: bool = True,
        depthwise_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        depthwise_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        depthwise_constraint: Any = None,
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
        super().__init__(
            kernel_size,
            strides=strides,
            padding=padding,
            data_format=data_format,
            dilation_rate=dilation_rate,
            activation=activation,
            use_bias=use_bias,
            bias_initializer=bias_initializer,
            bias_regularizer=bias_regularizer,
            activity_regularizer=activity_regularizer,
            bias_constraint=bias_constraint,
            **kwargs,
        )
        self.depth_multiplier = validation.positive_integer(
            depth_multiplier, "depth_multiplier"
        )
        self.depthwise_initializer = keras.initializers.get(depthwise_initializer)
        self.depthwise_regularizer = keras.regularizers.get(depthwise_regularizer)
        self.depthwise_constraint = keras.constraints.get(depthwise_constraint)
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
        if not self.similarity.shared_by_channels:
            raise ValueError(
                "`similarity` must be shared by all channels in a depthwise convolution. "
                f"Received: similarity={type(self.similarity).__name__!r}"
            )

    def output_channels(self, input_channels: int | None) -> int | None:
        return None if input_channels is None else input_channels * self.depth_multiplier

    def _predictor_kernel_regularizer(self) -> Any:
        return self.depthwise_regularizer

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        input_channels = self._build_window(input_shape)
        self.kernel = self.add_weight(
            name="kernel",
            shape=(*self.kernel_size, input_channels, self.depth_multiplier),
            initializer=self.depthwise_initializer,
            regularizer=self.depthwise_regularizer,
            constraint=self.depthwise_constraint,
            autocast=False,
        )
        self._build_bias(input_channels)
        self._build_similarity(self.kernel_size, input_channels)
        self._build_predictor(input_shape)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        self.compute_output_shape(inputs.shape)  # Raises for images that are too small.
        if self.predictor is None:
            outputs = ops.depthwise_conv(
                inputs,
                ops.cast(self.equivalent_kernel, inputs.dtype),
                strides=self.strides,
                padding=self.padding,
                data_format=self.data_format,
                dilation_rate=self.dilation_rate,
            )
        else:
            outputs = self._compare_at_positions(inputs, self._predict(inputs, training))
        return self.add_bias_and_activate(outputs)

    def _compare(self, inputs: Tensor, kernel: Tensor, parameters: Tensor) -> Tensor:
        return dynamic_depthwise_convolution(
            inputs,
            kernel,
            parameters,
            self._structure,
            strides=self.strides,
            padding=self.padding,
            dilation_rate=self.dilation_rate,
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "depth_multiplier": self.depth_multiplier,
            "depthwise_initializer": keras.initializers.serialize(
                self.depthwise_initializer
            ),
            "depthwise_regularizer": keras.regularizers.serialize(
                self.depthwise_regularizer
            ),
            "depthwise_constraint": keras.constraints.serialize(self.depthwise_constraint),
            **self._similarity_config(),
        }
