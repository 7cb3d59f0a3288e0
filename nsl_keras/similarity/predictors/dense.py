"""A predictor of dense layers: an `M` for each example."""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.similarity.predictors.base import Predictor
from nsl_keras.similarity.sphere import SphereDense


@keras.saving.register_keras_serializable("nsl_keras")
class DenseSimilarityPredictor(Predictor):
    """Predicts from a vector what its similarity matrix `M` adds to the identity.

    Two dense layers without bias. By `kind`, for the diagonal similarity (`T` outputs):

        "sphere":       SphereDense(H, input norm) -> BN -> ReLU -> Dense(T) -> BN
        "full_sphere":  SphereDense(H) -> BN -> ReLU -> SphereDense(T) -> BN
        "mlp":          Dense(H) -> BN -> ReLU -> Dense(T) -> BN

    For the unconstrained similarity (`T^2` outputs) and others there is no batch norm,
    except after the output of `"mlp"` and in `"full_sphere"`, which has both. `T` is
    `block_size`, or the width of the input.

    Args:
        block_size: int or `None`, as in the layer served; `None` is that of the layer
            served.
        kind: `"sphere"`, `"full_sphere"`, `"mlp"` (`"cnn"` is the same), or a name of your
            own from `nsl_keras.predictors.register`.
        similarity: Name or `Similarity` whose parameters are predicted; `None` is that of
            the layer served, and `"diagonal"` without one.
        hidden_units: int or `None`, the width of the hidden layer; `None` is half the
            units of the layer served, at least 8, and at most 64 for the diagonal
            similarity and 128 for others.
        batch_normalization: bool or `None`: `False` for no batch norm at all, which a
            recurrent cell needs; `True` for both; `None` for those named above.
        momentum: float in [0, 1), momentum of the batch norms, as for
            `SimilarityPredictor`.
        momentum_warmup: bool, as for `SimilarityPredictor`.
        epsilon: float above 0, added to the variances in the batch norms.
        synchronized: bool, whether batch norms take their statistics over all replicas of
            a `tf.distribute` strategy.
        hidden_kernel_initializer: Initializer of the first kernel; `None` is He's
            normal times 0.1.
        output_kernel_initializer: Initializer of the second kernel; `None` is that of
            `start`.
        start: `"identity"` or `"published"`, as for `SimilarityPredictor`.
        kernel_regularizer: Regularizer of both kernels.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`; the dtype is that of
            the layer served unless it is given.

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

    _width = "hidden_units"

    def __init__(
        self,
        block_size: int | None = None,
        kind: str = "sphere",
        similarity: Any = None,
        hidden_units: int | None = None,
        batch_normalization: bool | None = None,
        momentum: float = 0.9,
        momentum_warmup: bool = True,
        epsilon: float = 1e-3,
        synchronized: bool = False,
        hidden_kernel_initializer: Any = None,
        output_kernel_initializer: Any = None,
        start: str = "identity",
        kernel_regularizer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kind=kind,
            similarity=similarity,
            batch_normalization=batch_normalization,
            momentum=momentum,
            momentum_warmup=momentum_warmup,
            epsilon=epsilon,
            synchronized=synchronized,
            hidden_kernel_initializer=hidden_kernel_initializer,
            output_kernel_initializer=output_kernel_initializer,
            start=start,
            kernel_regularizer=kernel_regularizer,
            **kwargs,
        )
        self.block_size = validation.optional(
            validation.positive_integer, block_size, "block_size"
        )
        self.hidden_units = validation.optional(
            validation.positive_integer, hidden_units, "hidden_units"
        )
        self.input_spec = keras.layers.InputSpec(min_ndim=2)

    def _geometry(self, layer: keras.layers.Layer) -> dict[str, Any]:
        return self._equal(layer, "block_size")

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        features = validation.known_axis(input_shape, -1, "last axis")
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: features})
        taps = self.block_size or features
        self._build_network(taps, (taps,), tuple(input_shape))

    def _layer(
        self, place: str, normalize: str | None, initializer: keras.initializers.Initializer
    ) -> keras.layers.Layer:
        units = self.hidden_units if place == "hidden" else self.outputs
        options = self._options(f"{place}_dense", initializer)
        if normalize is None:
            return keras.layers.Dense(units, **options)
        return SphereDense(units, normalize=normalize, **options)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return (*input_shape[:-1], self.outputs)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "block_size": self.block_size,
            "hidden_units": self.hidden_units,
        }
