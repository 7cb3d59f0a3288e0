"""Convolutions with a neural similarity: `W^T M x` in place of `W^T x`.

At output position `p`, tap `u` (a position of the kernel) reads the input at
`p * stride + u * dilation - padding`, with the padding as TensorFlow's "same" splits it.
"""

from __future__ import annotations

import keras
from keras import ops

from nsl_keras.backend import Tensor
from nsl_keras.similarity.causal import CausalConv1D
from nsl_keras.similarity.dynamic import DynamicForm
from nsl_keras.similarity.neural_similarity import NeuralSimilarity


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityConv2D(NeuralSimilarity, keras.layers.Conv2D):
    """2D convolution with a learned or predicted bilinear similarity.

    For a kernel of `T` positions, the taps `t, u` (row-major), channels `c` and filters
    `o`, the layer computes at output position `p`

        y[p, o] = sum_c sum_t sum_u W[t, c, o] M[t, u] x[p, u, c] + b[o]

    *Static* (`predictor=None`): `M` is a weight that starts at the identity, so with
    default initializers the layer equals `keras.layers.Conv2D`. It convolves once with
    `equivalent_kernel`, and `fold()` returns the plain `Conv2D` that computes the same.

    *Dynamic*: a small network, the predictor, sees the input around `p` and predicts how
    the parameters of `M(x)` differ from the identity's. By default each block of 2x2
    positions shares one prediction unless `M` is diagonal. The layer cannot be folded and
    costs more than a convolution.

    Args:
        Same as `keras.layers.Conv2D`, plus:
        similarity: `"diagonal"` (DNS, `T` parameters), `"unconstrained"` (UNS, `T^2`),
            `"symmetric"`, `"positive_semidefinite"`, `"orthogonal"`, `"sparse"`, `"full"`,
            or a `nsl_keras.similarities.Similarity`, which takes more options.
        predictor: `None` for static; `"sphere"`, `"full_sphere"` or `"cnn"`; a
            `nsl_keras.predictors.SimilarityPredictor` or `SharedSimilarityPredictor`; or a
            layer that maps the input to the parameters of `M`, at every output position or
            one set per example. Requires `groups=1`.
        kernel_trainable: bool, whether to train kernel and bias as well as the similarity.
            Toggling `trainable` does not change it.
        block_size: int or `None`. With a kernel size of 1, a static `M` acts on blocks of
            this many channels, as in `NeuralSimilarityDense`. It must divide the channels
            that a filter reads.

    Input shape:
        `(batch, height, width, channels)` with `data_format="channels_last"`,
        `(batch, channels, height, width)` with `"channels_first"`.

    Output shape:
        That of `keras.layers.Conv2D`.

    Raises:
        ValueError: For anything that `keras.layers.Conv2D` refuses; for arguments outside
            these ranges; for a predictor with a similarity for static layers or a wrong
            number of outputs; for a `shared_by` that does not divide the channels; and for
            quantized policies.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> images = keras.random.normal((2, 8, 8, 3), seed=0)
    >>> static = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, padding="same")
    >>> tuple(static(images).shape), type(static.fold()).__name__
    ((2, 8, 8, 4), 'Conv2D')
    >>> dynamic = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, predictor="sphere")
    >>> tuple(dynamic(images).shape)
    (2, 6, 6, 4)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019): Section 3.1, Eqs. (1) and
        (2); static, Section 3.2; dynamic, Section 3.3, Eq. (3). The dynamic similarity adds
        the identity, as in the authors' code but not in Appendix A (`residual=False`).
    """

    plain = keras.layers.Conv2D


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityConv1D(NeuralSimilarity, CausalConv1D):
    """1D convolution with a learned or predicted bilinear similarity.

    This layer, an addition to the paper, is `NeuralSimilarityConv2D` for sequences. The
    predictor of a causal layer is causal too.

    Args:
        **kwargs: Arguments of `keras.layers.Conv1D` and `NeuralSimilarityConv2D`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityConv1D(4, 3, padding="causal")
    >>> tuple(layer(keras.ops.ones((2, 10, 3))).shape)
    (2, 10, 4)
    """

    plain = keras.layers.Conv1D


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityConv3D(NeuralSimilarity, keras.layers.Conv3D):
    """3D convolution with a learned or predicted bilinear similarity.

    This layer, an addition to the paper, is `NeuralSimilarityConv2D` for volumes.

    Args:
        **kwargs: Arguments of `keras.layers.Conv3D` and `NeuralSimilarityConv2D`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityConv3D(4, 3, similarity="symmetric")
    >>> tuple(layer(keras.ops.ones((2, 5, 5, 5, 3))).shape)
    (2, 3, 3, 3, 4)
    """

    plain = keras.layers.Conv3D


class DepthwiseForm(DynamicForm):
    """A dynamic `M(x)` of a depthwise convolution."""

    def product(self, kernel: Tensor, parameters: Tensor, inputs: Tensor) -> Tensor:
        *_, channels, multiplier = kernel.shape
        weighted = [
            tap
            for part in self.multiply_windows(parameters, inputs)
            for tap in ops.split(part, part.shape[-1] // channels, axis=-1)
        ]
        weights = ops.reshape(kernel, (len(weighted), channels, multiplier))
        weights = ops.cast(weights, inputs.dtype)
        outputs = []
        for each in ops.unstack(weights, multiplier, axis=-1):
            products = zip(weighted, ops.unstack(each, len(weighted)), strict=True)
            outputs.append(sum(tap * weight for tap, weight in products))  # NSL Eq. (3)
        # Keras orders the output channels as `c * multiplier + m`.
        shape = (*ops.shape(weighted[0])[:-1], channels * multiplier)
        return ops.reshape(ops.stack(outputs, axis=-1), shape)


class DepthwiseSimilarity(NeuralSimilarity):
    """Private mixin, in front of a Keras layer with a depthwise kernel."""

    filter_axes = (-2, -1)
    dynamic_form = DepthwiseForm

    def plain_product(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        options = (self.strides, self.padding, self.data_format, self.dilation_rate)
        return ops.depthwise_conv(inputs, kernel, *options)


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityDepthwiseConv2D(DepthwiseSimilarity, keras.layers.DepthwiseConv2D):
    """2D depthwise convolution with a learned or predicted bilinear similarity.

    The paper treats only full convolutions. For taps `t, u`, input channels `c` and the
    `m`-th filter of a channel, this layer computes at output position `p`

        y[p, (c, m)] = sum_t sum_u W[t, c, m] M[t, u] x[p, u, c] + b[(c, m)]

    Args:
        **kwargs: Arguments of `keras.layers.DepthwiseConv2D` and `NeuralSimilarityConv2D`.
            All channels share `M`; `"full"`, which would mix them, raises a ValueError.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityDepthwiseConv2D(3, padding="same")
    >>> tuple(layer(keras.ops.ones((2, 8, 8, 4))).shape)
    (2, 8, 8, 4)
    """

    plain = keras.layers.DepthwiseConv2D


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilaritySeparableConv2D(DepthwiseSimilarity, keras.layers.SeparableConv2D):
    """2D separable convolution whose depthwise part has a bilinear similarity.

    The layer applies a `NeuralSimilarityDepthwiseConv2D`, then a 1x1 convolution with the
    pointwise kernel `P`. At output position `p`,

        y[p, o] = sum_c sum_m P[(c, m), o] sum_t sum_u W[t, c, m] M[t, u] x[p, u, c] + b[o]

    Args:
        **kwargs: Arguments of `keras.layers.SeparableConv2D` and `NeuralSimilarityConv2D`.
            `"full"` raises a ValueError. A predictor's kernels have the
            `depthwise_regularizer`, and `kernel_trainable=False` also freezes the pointwise
            kernel.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilaritySeparableConv2D(6, 3, padding="same")
    >>> tuple(layer(keras.ops.ones((2, 8, 8, 4))).shape)
    (2, 8, 8, 6)
    """

    plain = keras.layers.SeparableConv2D
    kernel_name = "depthwise_kernel"

    @property
    def kernel(self) -> keras.Variable:
        """The depthwise kernel, which `M` multiplies."""
        return self.depthwise_kernel

    def apply_kernel(self, inputs: Tensor) -> Tensor:
        outputs = super().apply_kernel(inputs)
        pointwise = ops.cast(self.pointwise_kernel, outputs.dtype)
        return ops.conv(outputs, pointwise, data_format=self.data_format)
