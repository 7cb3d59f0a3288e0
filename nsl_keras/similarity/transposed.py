"""The transposed convolution with a neural similarity, the adjoint of the convolution."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras.backend import Tensor
from nsl_keras.similarity.neural_similarity import NeuralSimilarity


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityConv2DTranspose(NeuralSimilarity, keras.layers.Conv2DTranspose):
    """2D transposed convolution with a learned bilinear similarity.

    This layer is the adjoint of `NeuralSimilarityConv2D`: every input position `p` adds a
    patch `W x_p`, transformed by `M^T`, to the output. For taps `t, u`, channels `c` and
    filters `o`, at output position `q`,

        y[q, o] = sum_{p, u} sum_t M[t, u] sum_c W[t, o, c] x[p, c] + b[o]

    over all `p` and `u` with `q = p * stride + u * dilation - padding`.

    Args:
        **kwargs: Arguments of `keras.layers.Conv2DTranspose` and `NeuralSimilarityConv2D`.
            A predictor raises a ValueError. The matrix of `"full"` runs over the taps of
            all filters.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2DTranspose(
    ...     4, 3, strides=2, padding="same", similarity="unconstrained")
    >>> tuple(layer(keras.ops.ones((2, 8, 8, 3))).shape)
    (2, 16, 16, 4)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019) names semantic segmentation,
        which uses transposed convolutions, in Section 8 but treats none.
    """

    plain = keras.layers.Conv2DTranspose
    filter_axes = (-2,)
    dynamic_form = None

    def plain_product(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        options = (self.strides, self.padding, self.output_padding, self.data_format)
        return ops.conv_transpose(inputs, kernel, *options, self.dilation_rate)

    def get_config(self) -> dict[str, Any]:
        # Keras before 3.15 leaves it out.
        return {**super().get_config(), "output_padding": self.output_padding}
