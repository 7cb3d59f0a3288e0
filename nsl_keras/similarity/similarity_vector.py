"""Neural similarities of vectors: dense layers, and the kernels of recurrent cells.

A vector is cut into blocks of features that share one `M`: feature `block * T + t` of the
vector is what tap `t` of channel `block` is in a convolution.
"""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity.dense_predictor import KINDS, DenseSimilarityPredictor
from nsl_keras.similarity.neural_similarity import NeuralSimilarity


class SimilarityVector(NeuralSimilarity):
    """Private base: a similarity along the last axis, in blocks of `block_size`."""

    #: Batch norms of predictors given by name; `None` is as their kind has them.
    predictor_batch_normalization: bool | None = None

    def _store_vector_similarity(
        self, *, block_size: int | None, predictor_regularizer: Any, **arguments: Any
    ) -> None:
        """As `_store_similarity`; the regularizer is that of predictors given by name."""
        self.block_size = (
            None
            if block_size is None
            else validation.positive_integer(block_size, "block_size")
        )
        self._predictor_regularizer = predictor_regularizer
        self._store_similarity(**arguments)
        if not self.similarity.shared_by_channels:
            raise ValueError(
                "`similarity` must be shared by all blocks of a vector; 'unconstrained' "
                "without `block_size` is the full matrix. "
                f"Received: similarity={type(self.similarity).__name__!r}"
            )

    def _predictor_kinds(self) -> tuple[str, ...]:
        return KINDS

    def _make_predictor(self, kind: str) -> keras.layers.Layer:
        return DenseSimilarityPredictor(
            self.block_size,
            kind=kind,
            similarity=self.similarity,
            batch_normalization=self.predictor_batch_normalization,
            kernel_regularizer=self._predictor_regularizer,
            dtype=self.dtype_policy,
            name="predictor",
        )

    def _build_vector_similarity(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the weights of `M`, or builds what predicts it."""
        features = validation.known_axis(input_shape, -1, "last axis")
        taps = self.block_size or features
        if features % taps:
            raise ValueError(
                "`block_size` must divide the size of the vectors it cuts. "
                f"Received: block_size={self.block_size}, {features} features"
            )
        self._build_similarity((taps,), features // taps)
        if self.predictor is None:
            return
        if not self.predictor.built:
            self.predictor.build(tuple(input_shape))
        outputs = math.prod(self._structure.parameter_shape(taps))
        expected = (*input_shape[:-1], outputs)
        received = tuple(self.predictor.compute_output_shape(tuple(input_shape)))
        if received != expected:
            raise ValueError(
                "`predictor` must map each vector to one set of similarity parameters, "
                f"of shape {expected} for the input shape {tuple(input_shape)}. "
                f"Received: an output of shape {received}"
            )

    def _parameters(self, vectors: Tensor, training: bool | None) -> Tensor:
        """Returns the parameters of `M`: one set, or one a vector if it is dynamic."""
        if self.predictor is None:
            return ops.convert_to_tensor(self.similarity_parameters)
        return self._similarity_at(
            self.predictor(vectors, training=training), self.compute_dtype
        )

    def _compare(self, parameters: Tensor, vectors: Tensor) -> Tensor:
        """Returns `M v` for vectors `(..., features)`, in the compute dtype.

        A static `M` is applied in its own float32, whatever the vectors' dtype.
        """
        vectors = ops.cast(vectors, parameters.dtype)
        shape = ops.shape(vectors)
        # A static `M` takes the blocks of all vectors in one product.
        each = () if self.predictor is None else shape[:-1]
        rows = ops.reshape(vectors, (*each, -1, self._matrix_size))
        compared = self._structure.compare_rows(parameters, rows)
        return ops.cast(ops.reshape(compared, shape), self.compute_dtype)

    def _flatten(self, kernel: Tensor) -> Tensor:
        """Returns a kernel `(features, units)` as `(T, blocks, units)`."""
        blocks = ops.reshape(kernel, (-1, self._matrix_size, kernel.shape[-1]))
        return ops.swapaxes(blocks, 0, 1)

    def _unflatten(self, kernel: Tensor) -> Tensor:
        """Returns a kernel `(T, blocks, units)` as `(features, units)`."""
        return ops.reshape(ops.swapaxes(kernel, 0, 1), (-1, kernel.shape[-1]))
