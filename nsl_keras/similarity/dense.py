"""The dense layer with a neural similarity: `W^T M x` in place of `W^T x`."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras.backend import Tensor
from nsl_keras.similarity import predictors
from nsl_keras.similarity.neural_similarity import VectorSimilarity


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityDense(VectorSimilarity, keras.layers.Dense):
    """Dense layer with a learned or predicted bilinear similarity.

    With default initializers the static layer equals `keras.layers.Dense`: `M` starts at
    the identity. For an input `x` of `n` features,

        y = W^T M x + b,    M = diag(M_s, ..., M_s)

    with one block `M_s` of `block_size x block_size` that all `n / block_size` blocks of
    features share: feature `i = block * block_size + t`. Without `block_size` there is
    one block, `M = M_s`, of `n x n`.

    *Static* (`predictor=None`): `M` is a weight. The layer multiplies once with
    `equivalent_kernel`, `M^T W`, and `fold()` returns the plain `Dense` that computes the
    same.

    *Dynamic* (with a predictor): `M(x)` is the identity plus what the predictor sees in
    each vector `x`. The layer cannot be folded.

    Args:
        Those of `keras.layers.Dense`, and:
        similarity: `"diagonal"` (`T` parameters, where `T` is `block_size` or `n`),
            `"unconstrained"` (`T^2`), `"symmetric"`, `"positive_semidefinite"`,
            `"sparse"`, or a `nsl_keras.similarities.Similarity`.
        block_size: int that divides `n`, or `None` for one block of all features.
        similarity_initializer: Initializer of the static block `M_s`, called with its
            shape `(T, T)`; each kind of similarity takes its parameters from it.
        similarity_regularizer: Regularizer of the static similarity's parameters.
        similarity_constraint: Constraint on the static similarity's parameters.
        predictor: `None` for static; `"sphere"`, `"full_sphere"`, `"mlp"`, or a name of
            your own from `nsl_keras.predictors.register`, regularized as the kernel is; or
            a layer that maps each vector to the parameters of its `M`, such as a
            `nsl_keras.predictors.DenseSimilarityPredictor`.
        learn_shape: bool, whether to learn which features of a block the kernel reads:
            `M = D R`, with a Boolean diagonal `D` and `R` of the kind `similarity`,
            learned or predicted. `learned_shape` returns `D`.
        shape_threshold: float in [0, 1), the threshold that a feature's real-valued
            parameter, starting at 1, must exceed for the feature to live.
        kernel_trainable: bool, whether kernel and bias are trained besides the similarity.

    Call arguments:
        inputs: Tensor of rank 2 or more.
        training: bool, passed to the predictor (batch norm).

    Input shape:
        `(batch, ..., n)`.

    Output shape:
        `(batch, ..., units)`.

    Raises:
        ValueError: For arguments outside the ranges above, for the similarity `"full"`,
            for static similarity arguments or a static kind (`"sparse"`) with a predictor,
            at construction; if the number of features is unknown or not divisible by
            `block_size`, or a predictor has another output shape, at build; for LoRA and
            quantized policies.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> features = keras.random.normal((2, 12), seed=0)
    >>> static = nsl_keras.layers.NeuralSimilarityDense(
    ...     4, similarity="unconstrained", block_size=3)
    >>> tuple(static(features).shape), tuple(static.similarity_matrix.shape)
    ((2, 4), (3, 3))
    >>> plain = static.fold()
    >>> difference = keras.ops.max(keras.ops.abs(plain(features) - static(features)))
    >>> type(plain).__name__, bool(difference < 1e-6)
    ('Dense', True)
    >>> dynamic = nsl_keras.layers.NeuralSimilarityDense(4, predictor="sphere")
    >>> tuple(dynamic(features).shape)
    (2, 4)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 1 ("NSL can easily
        be applied to fully connected networks and recurrent networks") and Section 3.1,
        Eqs. (1) and (2), with features in place of taps; kernel shape, Section 3.5. The
        authors released no code for it.
    """

    def _get_predictor(self, predictor: Any) -> keras.layers.Layer | None:
        return predictors.get(
            predictor,
            predictors.DenseSimilarityPredictor,
            kernel_regularizer=self.kernel_regularizer,
        )

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        inputs = ops.cast(inputs, self.compute_dtype)  # Of integers too.
        kernel = ops.convert_to_tensor(self.kernel)
        if self.predictor is None:
            kernel = self.equivalent(kernel)
        else:
            inputs = self.compare(self.parameters(inputs, training), inputs)
        outputs = ops.matmul(inputs, ops.cast(kernel, inputs.dtype))
        if self.bias is not None:
            outputs = outputs + ops.cast(self.bias, outputs.dtype)
        return outputs if self.activation is None else self.activation(outputs)
