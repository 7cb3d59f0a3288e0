"""The transposed convolution with a neural similarity, the adjoint of the convolution."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras.backend import Tensor
from nsl_keras.similarity.dynamic import DynamicForm
from nsl_keras.similarity.neural_similarity import NeuralSimilarity


def transposed(inputs: Tensor, kernel: Tensor, geometry: dict[str, Any]) -> Tensor:
    """Returns Keras's transposed convolution."""
    options = {name: each for name, each in geometry.items() if name != "kernel_size"}
    return ops.conv_transpose(inputs, kernel, **options)


class TransposedForm(DynamicForm):
    """A dynamic `M(x)` of a transposed convolution, predicted at every input position."""

    def geometry_of_network(self) -> Any:
        geometry = {**self.geometry, "strides": (1, 1), "padding": "same"}
        del geometry["output_padding"]
        return geometry

    def apply_kernel(self, kernel: Tensor, parameters: Tensor, inputs: Tensor) -> Tensor:
        taps, (filters, channels) = self.taps, kernel.shape[-2:]
        batch, *sizes, _ = ops.shape(inputs)
        kernel = ops.transpose(ops.reshape(kernel, (taps, filters, channels)), (2, 1, 0))
        patches = ops.matmul(
            ops.reshape(inputs, (-1, channels)),
            ops.cast(ops.reshape(kernel, (channels, -1)), inputs.dtype),
        )
        patches = ops.reshape(patches, (batch, *sizes, filters, taps))
        parameters = self.at_positions(parameters, sizes)
        patches = ops.matmul(patches, self.similarity.matrix(parameters, taps))  # M^T W x
        # A kernel that copies each tap to its place adds the patches, filter by filter.
        patches = ops.reshape(ops.moveaxis(patches, -2, 1), (-1, *sizes, taps))
        places = ops.eye(taps, dtype=patches.dtype)
        places = ops.reshape(places, (*self.kernel_size, 1, taps))
        geometry = {**self.geometry, "data_format": "channels_last"}
        outputs = transposed(patches, places, geometry)
        outputs = ops.reshape(outputs, (batch, filters, *ops.shape(outputs)[1:-1]))
        return ops.moveaxis(outputs, 1, -1)


@keras.saving.register_keras_serializable("nsl_keras")
class NeuralSimilarityConv2DTranspose(NeuralSimilarity, keras.layers.Conv2DTranspose):
    """2D transposed convolution with a learned or predicted bilinear similarity.

    This layer is the adjoint of `NeuralSimilarityConv2D`: every input position `p` adds a
    patch `W x_p`, transformed by `M^T`, to the output. For a kernel of `T` taps `t, u`,
    channels `c`, filters `o`, at output position `q`,

        y[q, o] = sum_{p, u} sum_t M[t, u] sum_c W[t, o, c] x[p, c] + b[o]

    over all `p` and `u` with `q = p * stride + u * dilation - padding`. With default
    initializers the static layer equals `keras.layers.Conv2DTranspose`.

    A dynamic `M(x)` is predicted at every input position, or per block of positions, by
    layers of the kernel size and dilation of the layer, with padding `"same"`.

    Args:
        **kwargs: Arguments of `keras.layers.Conv2DTranspose` and `NeuralSimilarityConv2D`.
            The matrix of `"full"` runs over the taps of all filters.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2DTranspose(
    ...     4, 3, strides=2, padding="same", predictor="sphere")
    >>> tuple(layer(keras.ops.ones((2, 8, 8, 3))).shape)
    (2, 16, 16, 4)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 8, names semantic
        segmentation, whose decoders use transposed convolutions. The paper treats none.
    """

    plain = keras.layers.Conv2DTranspose
    filter_axes = (-2,)
    dynamic_form = TransposedForm

    def plain_product(self, inputs: Tensor, kernel: Tensor) -> Tensor:
        return transposed(inputs, kernel, self.geometry)

    @property
    def geometry(self) -> Any:
        return {**super().geometry, "output_padding": self.output_padding}

    def predicting_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        # Keras before 3.11 leaves it out.
        return {**super().get_config(), "output_padding": self.output_padding}
