"""The small network that predicts the similarity matrix of a vector from that vector."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.normalization import BatchNormalization
from nsl_keras.similarity import matrices
from nsl_keras.similarity.predictors import small_normal
from nsl_keras.similarity.sphere_dense import SphereDense

KINDS = ("sphere", "full_sphere", "mlp")


@keras.saving.register_keras_serializable("nsl_keras")
class DenseSimilarityPredictor(keras.layers.Layer):
    """Predicts from a vector what its similarity matrix `M` adds to the identity.

    Two dense layers without bias. By `kind`, for the diagonal similarity (`T` outputs):

        "sphere":       SphereDense(64, input norm) -> BN -> ReLU -> Dense(T) -> BN
        "full_sphere":  SphereDense(64) -> BN -> ReLU -> SphereDense(T) -> BN
        "mlp":          Dense(64) -> BN -> ReLU -> Dense(T) -> BN

    For the unconstrained similarity (`T^2` outputs) and others the hidden layer has 128
    units, and there is no batch norm, except behind the output of `"mlp"` and in
    `"full_sphere"`, which has both. `T` is `block_size`, or the width of the input.

    Args:
        block_size: int or `None`, as in the layer served.
        kind: `"sphere"`, `"full_sphere"` or `"mlp"`.
        similarity: Name or `Similarity` whose parameters are predicted.
        hidden_units: int or `None`, the width of the hidden layer; `None` is 64 for the
            diagonal similarity and 128 for others.
        batch_normalization: bool or `None`: `False` for no batch norm at all, which a
            recurrent cell needs; `True` for both; `None` for those named above.
        momentum: float in [0, 1), momentum of the batch norms.
        epsilon: float above 0, added to the variances in the batch norms.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy.
        hidden_kernel_initializer: Initializer of the first kernel; `None` is He's
            normal times 0.1.
        output_kernel_initializer: Initializer of the second kernel; `None` is He's
            normal times 0.001, which starts `M` close to the identity.
        kernel_regularizer: Regularizer of both kernels.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Call arguments:
        inputs: Tensor of rank 2 or more.
        training: bool, passed to the batch norms.

    Input shape:
        `(..., features)`.

    Output shape:
        `(..., outputs)`, with the `outputs` parameters of the similarity.

    Raises:
        ValueError: For arguments outside the ranges above, at construction; if the number
            of features is unknown, at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> predictor = nsl_keras.predictors.DenseSimilarityPredictor(kind="mlp")
    >>> tuple(predictor(keras.ops.ones((2, 16))).shape)
    (2, 16)
    >>> in_blocks = nsl_keras.predictors.DenseSimilarityPredictor(
    ...     3, similarity="unconstrained")
    >>> tuple(in_blocks(keras.ops.ones((2, 18))).shape)
    (2, 9)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.1, which
        predicts `M` with "hyperspherical fully-connected networks" too. Widths,
        initializers and batch norms are those of the authors' predictors of convolutions;
        they released none for vectors.
    """

    def __init__(
        self,
        block_size: int | None = None,
        kind: str = "sphere",
        similarity: Any = "diagonal",
        hidden_units: int | None = None,
        batch_normalization: bool | None = None,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        synchronized: bool = False,
        hidden_kernel_initializer: Any = None,
        output_kernel_initializer: Any = None,
        kernel_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.block_size = (
            None
            if block_size is None
            else validation.positive_integer(block_size, "block_size")
        )
        self.kind = validation.one_of(kind, KINDS, "kind")
        self.similarity = matrices.get(similarity)
        self.hidden_units = validation.positive_integer(
            self.similarity.predictor_filters if hidden_units is None else hidden_units,
            "hidden_units",
        )
        self.batch_normalization = validation.one_of(
            batch_normalization, (None, True, False), "batch_normalization"
        )
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
        self.input_spec = keras.layers.InputSpec(min_ndim=2)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        features = validation.known_axis(input_shape, -1, "last axis")
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: features})
        hidden, output = {
            "sphere": ("input", None),
            "full_sphere": ("both", "both"),
            "mlp": (None, None),
        }[self.kind]
        normalized = (
            self.similarity.predictor_batch_normalization or self.kind == "full_sphere"
            if self.batch_normalization is None
            else self.batch_normalization
        )
        output_normalized = normalized or (
            self.batch_normalization is None and self.kind == "mlp"
        )
        # Here, and not at construction: the width of the last layer follows the input's.
        self.hidden_dense = self._dense(
            self.hidden_units, hidden, self.hidden_kernel_initializer, "hidden_dense"
        )
        self.hidden_normalization = (
            self._batch_normalization("hidden_normalization") if normalized else None
        )
        self.output_dense = self._dense(
            self._outputs(features),
            output,
            self.output_kernel_initializer,
            "output_dense",
        )
        self.output_normalization = (
            self._batch_normalization("output_normalization") if output_normalized else None
        )
        shape = tuple(input_shape)
        for layer in (
            self.hidden_dense,
            self.hidden_normalization,
            self.output_dense,
            self.output_normalization,
        ):
            if layer is not None:
                layer.build(shape)
                shape = tuple(layer.compute_output_shape(shape))

    def _outputs(self, features: int) -> int:
        taps = self.block_size or features
        return math.prod(self.similarity.for_kernel_size((taps,)).parameter_shape(taps))

    def _dense(
        self, units: int, normalize: str | None, initializer: Any, name: str
    ) -> keras.layers.Layer:
        options = {
            "use_bias": False,
            "kernel_initializer": initializer,
            "kernel_regularizer": self.kernel_regularizer,
            "dtype": self.dtype_policy,
            "name": name,
        }
        if normalize is None:
            return keras.layers.Dense(units, **options)
        return SphereDense(units, normalize=normalize, **options)

    def _batch_normalization(self, name: str) -> keras.layers.Layer:
        return BatchNormalization(
            momentum=self.momentum,
            epsilon=self.epsilon,
            synchronized=self.synchronized,
            dtype=self.dtype_policy,
            name=name,
        )

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        outputs = self.hidden_dense(inputs)
        if self.hidden_normalization is not None:
            outputs = self.hidden_normalization(outputs, training=training)
        outputs = self.output_dense(ops.relu(outputs))
        if self.output_normalization is not None:
            outputs = self.output_normalization(outputs, training=training)
        return outputs

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        features = validation.known_axis(input_shape, -1, "last axis")
        return (*input_shape[:-1], self._outputs(features))

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "block_size": self.block_size,
            "kind": self.kind,
            "similarity": matrices.serialize(self.similarity),
            "hidden_units": self.hidden_units,
            "batch_normalization": self.batch_normalization,
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
