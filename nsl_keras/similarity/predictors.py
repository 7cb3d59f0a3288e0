"""Small networks that predict the similarity matrix of a dynamic layer from its input."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.normalization import BatchNormalization
from nsl_keras.similarity import geometry, matrices
from nsl_keras.similarity.sphere import SphereConv1D, SphereConv2D, SphereConv3D

KINDS = ("sphere", "full_sphere", "cnn")

_SPHERE = {1: SphereConv1D, 2: SphereConv2D, 3: SphereConv3D}
_PLAIN = {1: keras.layers.Conv1D, 2: keras.layers.Conv2D, 3: keras.layers.Conv3D}


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
    stride 1 and `"same"` (`"causal"` in a causal predictor), so that the prediction has
    exactly the output's positions.

    Args:
        kernel_size: int or tuple of 1, 2 or 3 ints, as in the convolution served; an int
            is a square 2D kernel.
        kind: `"sphere"`, `"full_sphere"` or `"cnn"`. Plain convolutions diverge without
            the normalised output, the paper finds.
        similarity: Name or `Similarity` whose parameters are predicted.
        hidden_filters: int or `None`, the width of the hidden layer; `None` is 64 for
            the diagonal similarity and 128 for others.
        strides: int or tuple of ints, as in the convolution served.
        padding: `"valid"`, `"same"` or, in 1D, `"causal"`, as in the convolution served.
        data_format: `"channels_last"` or `"channels_first"`; defaults to
            `keras.config.image_data_format()`.
        dilation_rate: int or tuple of ints, as in the convolution served.
        pooled: bool, whether to predict one `M` per example, the mean of what is predicted
            at its positions, instead of one per position.
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
        `(batch, *spatial, channels)` with `data_format="channels_last"`,
        `(batch, channels, *spatial)` with `"channels_first"`.

    Output shape:
        `(batch, *new_spatial, outputs)` or `(batch, outputs, *new_spatial)`, with the
        `outputs` parameters of the similarity; `(batch, outputs)` if pooled.

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
        pooled: bool = False,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        synchronized: bool = False,
        hidden_kernel_initializer: Any = None,
        output_kernel_initializer: Any = None,
        kernel_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.kernel_size = _kernel_size(kernel_size)
        rank = len(self.kernel_size)
        self.kind = validation.one_of(kind, KINDS, "kind")
        self.similarity = matrices.get(similarity)
        self.hidden_filters = validation.positive_integer(
            self.similarity.predictor_filters if hidden_filters is None else hidden_filters,
            "hidden_filters",
        )
        self.strides = validation.positive_integers(strides, rank, "strides")
        self.padding = geometry.standardize_padding(padding, rank)
        self.data_format = validation.one_of(
            data_format or keras.config.image_data_format(),
            ("channels_last", "channels_first"),
            "data_format",
        )
        self.dilation_rate = validation.positive_integers(
            dilation_rate, rank, "dilation_rate"
        )
        self.pooled = pooled
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

        if self.similarity.static_only:
            raise ValueError(
                "`similarity` must be one that can be predicted. "
                f"Received: similarity={type(self.similarity).__name__!r}"
            )
        taps = math.prod(self.kernel_size)
        self.outputs = math.prod(
            self.similarity.for_kernel_size(self.kernel_size).parameter_shape(taps)
        )
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
            padding="causal" if self.padding == "causal" else "same",
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
        rank = len(self.kernel_size)
        if normalize is None:
            return _PLAIN[rank](filters, self.kernel_size, **options)
        return _SPHERE[rank](filters, self.kernel_size, normalize=normalize, **options)

    def _batch_normalization(self, name: str) -> keras.layers.Layer:
        return BatchNormalization(
            axis=-1 if self.data_format == "channels_last" else 1,
            momentum=self.momentum,
            epsilon=self.epsilon,
            synchronized=self.synchronized,
            dtype=self.dtype_policy,
            name=name,
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        validation.rank(input_shape, len(self.kernel_size) + 2)
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
        if self.pooled:
            first = 1 if self.data_format == "channels_last" else 2
            axes = tuple(range(first, first + len(self.kernel_size)))
            outputs = ops.mean(outputs, axis=axes)
        return outputs

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        shape = self.output_convolution.compute_output_shape(
            self.hidden_convolution.compute_output_shape(input_shape)
        )
        return (shape[0], self.outputs) if self.pooled else shape

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
            "pooled": self.pooled,
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


@keras.saving.register_keras_serializable("nsl_keras")
class SharedSimilarityPredictor(SimilarityPredictor):
    """One predictor for several dynamic layers, each behind its own adaptation.

    Give the same object as `predictor=` to several layers. Each of them makes a small
    convolution of its own that brings its input to `adapted_filters` channels, with the
    layer's own kernel size, strides, padding and dilation; behind it the shared network,
    a `SimilarityPredictor` of stride 1, predicts `M` for all of them:

        M = I + shared(adaptation(x))

    With 32 adapted filters the predictors of CNN-9 hold half the parameters of disjoint
    ones. The layers' kernels must have the same number of taps.

    A saved model keeps the sharing. `keras.models.clone_model`, which rebuilds layers one
    by one, gives each of them a predictor of its own.

    Args:
        kernel_size: int or tuple of 1, 2 or 3 ints, as in the layers served.
        kind: `"sphere"`, `"full_sphere"` or `"cnn"`, as for `SimilarityPredictor`.
        similarity: Name or `Similarity`, as in the layers served.
        adapted_filters: int, the number of channels behind each layer's adaptation.
        hidden_filters: int or `None`, as for `SimilarityPredictor`.
        padding: `"same"`, or `"causal"` for causal 1D layers.
        adaptation_initializer: Initializer of the adaptations' kernels.
        **kwargs: `data_format`, `pooled`, `momentum`, `epsilon`, `synchronized`,
            `hidden_kernel_initializer`, `output_kernel_initializer` and
            `kernel_regularizer` (of the adaptations' kernels too) of
            `SimilarityPredictor`; `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Input shape:
        `(batch, *spatial, adapted_filters)` with `data_format="channels_last"`,
        `(batch, adapted_filters, *spatial)` with `"channels_first"`.

    Output shape:
        `(batch, *spatial, outputs)` or `(batch, outputs, *spatial)`; `(batch, outputs)` if
        pooled.

    Raises:
        ValueError: For arguments outside the ranges above.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> shared = nsl_keras.predictors.SharedSimilarityPredictor(3)
    >>> model = keras.Sequential([
    ...     keras.Input((16, 16, 3)),
    ...     nsl_keras.layers.NeuralSimilarityConv2D(8, 3, predictor=shared),
    ...     nsl_keras.layers.NeuralSimilarityConv2D(16, 3, strides=2, predictor=shared),
    ... ])
    >>> model.layers[0].predictor is model.layers[1].predictor
    True

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.2 and Figure
        3(b). The paper does not say how wide the adaptation is, and the authors released
        no code for it; 32 filters of the layer's own kernel size save the "nearly half"
        that Section 7.1 states.
    """

    def __init__(
        self,
        kernel_size: int | tuple[int, ...],
        kind: str = "sphere",
        similarity: Any = "diagonal",
        adapted_filters: int = 32,
        hidden_filters: int | None = None,
        padding: str = "same",
        adaptation_initializer: Any = "he_normal",
        **kwargs: Any,
    ) -> None:
        if padding not in ("same", "causal"):
            raise ValueError(
                "`padding` must be 'same' or 'causal' in a shared predictor: the "
                "adaptations have the layers' own geometry. "
                f"Received: padding={padding!r}"
            )
        for name in ("strides", "dilation_rate"):
            if name in kwargs:
                raise ValueError(
                    f"`{name}` belongs to the layers that share a predictor. "
                    f"Received: {name}={kwargs[name]!r}"
                )
        super().__init__(
            kernel_size,
            kind=kind,
            similarity=similarity,
            hidden_filters=hidden_filters,
            padding=padding,
            **kwargs,
        )
        self.adapted_filters = validation.positive_integer(
            adapted_filters, "adapted_filters"
        )
        self.adaptation_initializer = keras.initializers.get(adaptation_initializer)

    def adaptation(self, kernel_size: tuple[int, ...], **options: Any) -> keras.Layer:
        """Returns a new convolution that brings a layer's input to the shared width.

        Args:
            kernel_size: The layer's kernel size.
            **options: `strides`, `padding`, `dilation_rate` of the layer, and `dtype` and
                `name` of the adaptation.
        """
        if len(kernel_size) != len(self.kernel_size):
            raise ValueError(
                f"`predictor` must have a kernel of {len(kernel_size)} axes here. "
                f"Received: predictor.kernel_size={self.kernel_size}"
            )
        return _PLAIN[len(kernel_size)](
            self.adapted_filters,
            kernel_size,
            data_format=self.data_format,
            use_bias=False,
            kernel_initializer=self.adaptation_initializer,
            kernel_regularizer=self.kernel_regularizer,
            **options,
        )

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for name in ("strides", "dilation_rate"):
            del config[name]
        return {
            **config,
            "adapted_filters": self.adapted_filters,
            "adaptation_initializer": keras.initializers.serialize(
                self.adaptation_initializer
            ),
        }


def _kernel_size(value: Any) -> tuple[int, ...]:
    if isinstance(value, (int, np.integer)):
        return validation.positive_integers(value, 2, "kernel_size")
    if not isinstance(value, (tuple, list)) or not 1 <= len(value) <= 3:
        raise ValueError(
            "`kernel_size` must be a positive integer or 1 to 3 of them. "
            f"Received: kernel_size={value!r}"
        )
    return validation.positive_integers(tuple(value), len(value), "kernel_size")
