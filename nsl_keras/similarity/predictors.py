"""Small networks that predict the similarity matrix of a dynamic layer from its input."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.similarity import matrices
from nsl_keras.similarity.sphere import SphereConv2D

Tensor = Any

KINDS = ("sphere", "full_sphere", "cnn")


def small_normal(scale: float) -> keras.initializers.Initializer:
    """He's normal initializer times `scale`; the authors use 0.1 and 0.001."""
    return keras.initializers.VarianceScaling(
        2.0 * scale**2, mode="fan_in", distribution="untruncated_normal"
    )


@keras.saving.register_keras_serializable("nsl_keras")
class SimilarityPredictor(keras.layers.Layer):
    """Predicts, at every output position of a convolution, what `M` adds to the identity.

    Two layers with the kernel size of the convolution they serve. By `kind`, for the
    diagonal similarity (`T` outputs, the number of taps):

        "sphere":       SphereConv(64, input norm) -> BN -> ReLU -> Conv(T) -> BN
        "full_sphere":  SphereConv(64) -> BN -> ReLU -> SphereConv(T) -> BN
        "cnn":          Conv(64) -> BN -> ReLU -> Conv(T) -> BN

    For the unconstrained similarity (`T^2` outputs) and others the hidden layer has 128
    filters, and there is no batch norm, except behind the output of `"cnn"` and in
    `"full_sphere"`, which has both.

    The first layer has the strides, padding and dilation of the convolution, the second
    stride 1 and `"same"`, so that the prediction has exactly the output's positions.

    Args:
        kernel_size: int or tuple of 2 ints, as in the convolution served.
        kind: `"sphere"`, `"full_sphere"` or `"cnn"`. Plain convolutions diverge without
            the normalised output, the paper finds.
        similarity: Name or `Similarity` whose parameters are predicted.
        hidden_filters: int or `None`, the width of the hidden layer; `None` is 64 for
            the diagonal similarity and 128 for others.
        strides: int or tuple of 2 ints, as in the convolution served.
        padding: `"valid"` or `"same"`, as in the convolution served.
        data_format: `"channels_last"` or `"channels_first"`; defaults to
            `keras.config.image_data_format()`.
        dilation_rate: int or tuple of 2 ints, as in the convolution served.
        momentum: float in [0, 1), momentum of the batch norms (the authors: 0.999). In
            trainings of a few hundred steps take 0.9: until the moving statistics have
            settled, validation is far below training.
        epsilon: float above 0, added to the variances in the batch norms.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy.
        hidden_kernel_initializer: Initializer of the first kernel; `None` is He's
            normal times 0.1, as in the authors' code.
        output_kernel_initializer: Initializer of the second kernel; `None` is He's
            normal times 0.001, which starts `M` close to the identity.
        kernel_regularizer: Regularizer of both kernels.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Input shape:
        `(batch, height, width, channels)` with `data_format="channels_last"`,
        `(batch, channels, height, width)` with `"channels_first"`.

    Output shape:
        `(batch, new_height, new_width, outputs)` or
        `(batch, outputs, new_height, new_width)`, with the `outputs` parameters of the
        similarity.

    Raises:
        ValueError: For arguments outside the ranges above.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> predictor = nsl_keras.predictors.SimilarityPredictor(3, padding="same")
    >>> tuple(predictor(keras.ops.ones((2, 8, 8, 4))).shape)
    (2, 8, 8, 9)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.1 and
        Appendix A. The paper mentions no batch norm; the places above are those of the
        authors' code, as is the plain second convolution of `"sphere"`.
    """

    def __init__(
        self,
        kernel_size: int | tuple[int, ...],
        kind: str = "sphere",
        similarity: Any = "diagonal",
        hidden_filters: int | None = None,
        strides: int | tuple[int, ...] = 1,
        padding: str = "valid",
        data_format: str | None = None,
        dilation_rate: int | tuple[int, ...] = 1,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        synchronized: bool = False,
        hidden_kernel_initializer: Any = None,
        output_kernel_initializer: Any = None,
        kernel_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.kernel_size = validation.positive_integers(kernel_size, 2, "kernel_size")
        self.kind = validation.one_of(kind, KINDS, "kind")
        self.similarity = matrices.get(similarity)
        self.hidden_filters = validation.positive_integer(
            self.similarity.predictor_filters if hidden_filters is None else hidden_filters,
            "hidden_filters",
        )
        self.strides = validation.positive_integers(strides, 2, "strides")
        self.padding = validation.one_of(padding, ("valid", "same"), "padding")
        self.data_format = validation.one_of(
            data_format or keras.config.image_data_format(),
            ("channels_last", "channels_first"),
            "data_format",
        )
        self.dilation_rate = validation.positive_integers(dilation_rate, 2, "dilation_rate")
        self.momentum = validation.fraction(momentum, "momentum")
        self.epsilon = validation.positive_number(epsilon, "epsilon")
        self.synchronized = synchronized
        self.hidden_kernel_initializer = keras.initializers.get(
            hidden_kernel_initializer or small_normal(0.1)
        )
        self.output_kernel_initializer = keras.initializers.get(
            output_kernel_initializer or small_normal(0.001)
        )
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)

        taps = self.kernel_size[0] * self.kernel_size[1]
        self.outputs = 1
        for size in self.similarity.parameter_shape(taps):
            self.outputs *= size
        normalized = self.similarity.predictor_batch_normalization or kind == "full_sphere"
        self.hidden_convolution = self._convolution(
            self.hidden_filters,
            {"sphere": "input", "full_sphere": "both", "cnn": None}[kind],
            self.hidden_kernel_initializer,
            strides=self.strides,
            padding=self.padding,
            dilation_rate=self.dilation_rate,
            name="hidden_convolution",
        )
        self.hidden_normalization = (
            self._batch_normalization("hidden_normalization") if normalized else None
        )
        self.output_convolution = self._convolution(
            self.outputs,
            {"sphere": None, "full_sphere": "both", "cnn": None}[kind],
            self.output_kernel_initializer,
            padding="same",
            name="output_convolution",
        )
        self.output_normalization = (
            self._batch_normalization("output_normalization")
            if normalized or kind == "cnn"
            else None
        )

    def _convolution(
        self, filters: int, normalize: str | None, initializer: Any, **options: Any
    ) -> keras.layers.Layer:
        options = {
            **options,
            "data_format": self.data_format,
            "use_bias": False,
            "kernel_initializer": initializer,
            "kernel_regularizer": self.kernel_regularizer,
            "dtype": self.dtype_policy,
        }
        if normalize is None:
            return keras.layers.Conv2D(filters, self.kernel_size, **options)
        return SphereConv2D(filters, self.kernel_size, normalize=normalize, **options)

    def _batch_normalization(self, name: str) -> keras.layers.Layer:
        return keras.layers.BatchNormalization(
            axis=-1 if self.data_format == "channels_last" else 1,
            momentum=self.momentum,
            epsilon=self.epsilon,
            synchronized=self.synchronized,
            dtype=self.dtype_policy,
            name=name,
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        validation.rank(input_shape, 4)
        shape = tuple(input_shape)
        for layer in (
            self.hidden_convolution,
            self.hidden_normalization,
            self.output_convolution,
            self.output_normalization,
        ):
            if layer is not None:
                layer.build(shape)
                shape = layer.compute_output_shape(shape)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        outputs = self.hidden_convolution(inputs)
        if self.hidden_normalization is not None:
            outputs = self.hidden_normalization(outputs, training=training)
        outputs = self.output_convolution(ops.relu(outputs))
        if self.output_normalization is not None:
            outputs = self.output_normalization(outputs, training=training)
        return outputs

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return self.output_convolution.compute_output_shape(
            self.hidden_convolution.compute_output_shape(input_shape)
        )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "kernel_size": self.kernel_size,
            "kind": self.kind,
            "similarity": matrices.serialize(self.similarity),
            "hidden_filters": self.hidden_filters,
            "strides": self.strides,
            "padding": self.padding,
            "data_format": self.data_format,
            "dilation_rate": self.dilation_rate,
            "momentum": self.momentum,
            "epsilon": self.epsilon,
            "synchronized": self.synchronized,
            "hidden_kernel_initializer": keras.initializers.serialize(
                self.hidden_kernel_initializer
            ),
            "output_kernel_initializer": keras.initializers.serialize(
                self.output_kernel_initializer
            ),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
        }
