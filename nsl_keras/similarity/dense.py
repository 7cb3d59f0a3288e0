"""The dense layer with a neural similarity: `W^T M x` in place of `W^T x`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.similarity.dynamic import DynamicForm
from nsl_keras.similarity.neural_similarity import NeuralSimilarity


class VectorForm(DynamicForm):
    """A dynamic `M(x)` of vectors, in dense layers and recurrent cells."""

    def call(
        self,
        vectors: Tensor,
        kernel: Tensor,
        training: bool | None = None,
        vectors_mask: Tensor | None = None,
    ) -> Tensor:
        if self.shape_parameters is not None:
            mask = ops.tile(self.shape_mask(), self.channels)
            kernel = mask[:, None] * kernel  # NSL Eq. (4)
        products = self.multiply(vectors, mask=vectors_mask)
        return ops.matmul(products, ops.cast(kernel, vectors.dtype))

    def multiply(
        self, vectors: Tensor, seen: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Returns `M v` for vectors `v`, with `M` predicted from `seen` (default `v`)."""
        parameters = self.predict_parameters(vectors if seen is None else seen, mask=mask)
        shape = ops.shape(vectors)
        rows = ops.reshape(vectors, (*shape[:-1], self.channels, self.taps))
        products = self.similarity.apply_to_rows(parameters, rows)  # NSL Eq. (3)
        return ops.reshape(products, shape)


class FeatureSimilarity(NeuralSimilarity):
    """Private mixin, in front of a Keras layer whose kernel multiplies features.

    A static `M` multiplies a kernel of floats, or the input of an int8 kernel.
    """

    quantized = ("int8",)

    def quantized_call(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        axes = [axis % len(inputs.shape) for axis in self.input_axes]
        order = [axis for axis in range(len(inputs.shape)) if axis not in axes] + axes
        products = self.bilinear_form.multiply(ops.transpose(inputs, order))
        inputs = ops.transpose(products, np.argsort(order).tolist())
        return super().quantized_call(inputs, *args, **kwargs)

    def build_similarity(self, input_shape: tuple[int | None, ...]) -> None:
        if self.quantization_mode is not None:
            given, demand = self.predictor, "None in a quantized layer"
            validation.require(given is None, "predictor", demand, given)
            similarity, demand = self.similarity, "without `learn_shape` and of all filters"
            fits = similarity.shared_by != "filter" and not similarity.learn_shape
            validation.require(fits, "similarity", f"{demand} in such a layer", similarity)
        super().build_similarity(input_shape)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        return super().call(inputs)


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityDense(FeatureSimilarity, keras.layers.Dense):
    """Dense layer with a learned or predicted bilinear similarity.

    For an input `x` of `n` features,

        y = W^T M x + b,    M = diag(M_s, ..., M_s)

    where all blocks of `block_size` consecutive features share one matrix `M_s`. A static
    layer starts as `keras.layers.Dense`, because `M` starts at the identity, and folds into
    one with the kernel `M^T W`. In a dynamic layer a small network that sees `x` predicts
    how the parameters of `M(x)` differ from the identity's.

    Args:
        Same as `keras.layers.Dense` and `NeuralSimilarityConv2D`, plus:
        block_size: int that divides `n`, or `None` for one block of all features. The
            features of a block take the place of taps, and the blocks that of channels,
            which cannot be `"full"`. A static block has at most 1,024 features unless it is
            diagonal.

    Call arguments:
        inputs: Tensor of rank 2 or more. The predictor's batch norms leave out vectors that
            a Keras mask marks, for example of `keras.layers.Masking`; the mask is passed
            on.
        training: bool, passed to the predictor for its batch norms.

    Raises:
        ValueError: As in `NeuralSimilarityConv2D`, and at build for a `block_size` that
            does not fit.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityDense(
    ...     4, similarity="unconstrained", block_size=3)
    >>> tuple(layer(keras.ops.ones((2, 12))).shape), tuple(layer.similarity_matrix.shape)
    ((2, 4), (3, 3))

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Sections 1 and 3.1, Eqs. (1)
        and (2), with features in place of taps; kernel shape, Section 3.5.
    """

    plain = keras.layers.Dense
    dynamic_form = VectorForm
    feature_axes = (0,)

    def plain_product(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        return ops.matmul(inputs, kernel)
