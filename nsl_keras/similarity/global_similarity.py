"""Global neural similarity: `M` couples the positions of a whole feature map."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import keras
from keras import ops

from nsl_keras import nesting, validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.similarity.predictors import FloatDense, small_normal
from nsl_keras.similarity.sphere import SphereConv2D, SphereDense

STATIC = ("diagonal", "unconstrained")
SIMILARITIES = (*STATIC, "predicted_mask", "attention", "softmax_attention")


@keras.saving.register_keras_serializable("nsl_keras")
class GlobalNeuralSimilarity2D(nesting.KeepsFrozen):
    """Global neural similarity (GNS): `M_G X`, to be followed by a convolution.

    With the feature map as a matrix `X` of `HW` positions (row-major) and `C` channels,

        (M_G X)[p, c] = sum_q M[p, q] X[q, c]

    All channels share the block `M`, of shape `(HW, HW)`, by default. A `Conv2D` after this
    layer adds the kernel of the paper's `F = W_G^T M_G X`. `similarity` chooses `M_G X`:

        "diagonal":           diag(m) X, with a learned spatial mask m
        "unconstrained":      M X, with a learned matrix
        "predicted_mask":     X + diag(P(X)) X, P = SphereConv(3x3) -> ReLU -> Conv(3x3, 1)
        "attention":          G1(X) G2(X)^T X, self-attention
        "softmax_attention":  X + gamma softmax(relu(G1(X)) G2(X)^T) G3(X)

    with 1x1 convolutions `G` and a learned scalar `gamma` that starts at zero. `G1` and
    `G2` have `C` channels (`C // 8` in `"softmax_attention"`), and the mask's hidden layer
    has 64. All except `"attention"` start at the identity. `"attention"` takes time linear
    in `HW`, `"softmax_attention"` and `"unconstrained"` time and memory of `(HW)^2`.

    Args:
        similarity: One of the names above.
        regularizer: Regularizer of the learned mask or matrix, or of each kernel that
            predicts `M`.
        sphere: bool, whether `G1`, `G2`, `G3` are SphereConvs that divide by both norms,
            and the first layer of the mask's predictor is a SphereConv that divides by the
            input norm. `False` uses plain convolutions, which train less stably.
        data_format: As in `keras.layers.Conv2D`.
        shared_by_channels: bool, whether channels share `M`. `False` gives each channel its
            own mask; in `"unconstrained"` one `M` of shape `(HWC, HWC)` couples all
            positions and channels, channels last. The attentions require `True`.
        **kwargs: Arguments of `keras.layers.Layer`.

    Input shape:
        That of `keras.layers.Conv2D`. `"diagonal"` and `"unconstrained"` need a known
        height and width.

    Output shape:
        The same as the input.

    Raises:
        ValueError: For invalid arguments, for inputs of another rank, and for unknown sizes
            that the layer needs.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> images = keras.random.normal((2, 8, 8, 16), seed=0)
    >>> block = nsl_keras.layers.GlobalNeuralSimilarity2D("softmax_attention")
    >>> bool(keras.ops.all(block(images) == images))  # It starts at the identity.
    True

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Appendix B, Eq. (8)-(11).
        `"softmax_attention"` is the block of the authors' code.
    """

    def __init__(
        self,
        similarity: str = "diagonal",
        regularizer: Any = None,
        sphere: bool = True,
        data_format: str | None = None,
        shared_by_channels: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.similarity = validation.one_of(similarity, SIMILARITIES, "similarity")
        self.regularizer = keras.regularizers.get(regularizer)
        self.sphere = validation.boolean(sphere, "sphere")
        self.shared_by_channels = validation.boolean(
            shared_by_channels, "shared_by_channels"
        )
        fits = "attention" not in similarity or self.shared_by_channels
        demand = f"True with similarity={similarity!r}"
        validation.require(fits, "shared_by_channels", demand, shared_by_channels)
        formats = ("channels_last", "channels_first")
        data_format = data_format or keras.config.image_data_format()
        self.data_format = validation.one_of(data_format, formats, "data_format")
        self.channel_axis = 3 if self.data_format == "channels_last" else 1
        self.input_spec = keras.layers.InputSpec(ndim=4)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        channels = validation.known_axis(input_shape, self.channel_axis, "channel axis")
        masks = 1 if self.shared_by_channels else channels
        fixed = [self.channel_axis]
        if self.similarity in STATIC:
            fixed, name = [1, 2, 3], "height and width"
            sizes = [validation.known_axis(input_shape, axis, name) for axis in fixed]
            size = masks * math.prod(sizes) // channels
            is_mask = self.similarity == "diagonal"
            self.similarity_parameters = self.add_weight(
                name="similarity",
                shape=(size,) if is_mask else (size, size),
                initializer="ones" if is_mask else "identity",
                regularizer=self.regularizer,
            )
        elif self.similarity == "predicted_mask":
            self._build_mask_predictor(channels, masks)
        else:
            self._build_attention(channels)
        axes = {axis: input_shape[axis] for axis in fixed}
        self.input_spec = keras.layers.InputSpec(ndim=4, axes=axes)
        nesting.pass_on_frozen(self)

    def _build_mask_predictor(self, channels: int, masks: int) -> None:
        plain = keras.layers.Conv2D
        hidden = partial(SphereConv2D, normalize="input") if self.sphere else plain
        options = {**self._options(), "padding": "same", "data_format": "channels_last"}
        start = small_normal(0.1)
        self.mask_hidden = hidden(64, 3, kernel_initializer=start, **options)
        self.mask_output = plain(masks, 3, kernel_initializer="zeros", **options)
        self.mask_hidden.build((None, None, None, channels))
        self.mask_output.build((None, None, None, 64))

    def _build_attention(self, channels: int) -> None:
        softmax = self.similarity == "softmax_attention"
        hidden = max(channels // 8, 1) if softmax else channels
        dense = SphereDense if self.sphere else FloatDense

        def transform(units: int) -> keras.layers.Layer:
            # A dense layer on every position is a 1x1 convolution.
            start = small_normal(1.0)
            layer = dense(units, kernel_initializer=start, **self._options())
            layer.build((None, None, channels))
            return layer

        self.query, self.key = transform(hidden), transform(hidden)
        if softmax:
            self.value = transform(channels)
            self.gamma = self.add_weight(name="gamma", shape=(), initializer="zeros")

    def _options(self) -> dict[str, Any]:
        regularizer, dtype = self.regularizer, self.dtype_policy
        return {"use_bias": False, "kernel_regularizer": regularizer, "dtype": dtype}

    def call(self, inputs: Tensor) -> Tensor:
        inputs = ops.cast(inputs, self.compute_dtype)  # Including integers.
        features = ops.moveaxis(inputs, self.channel_axis, -1)
        # NSL Eq. (8): M_G X, which the next convolution multiplies with its kernel.
        return ops.moveaxis(self._compare(features), -1, self.channel_axis)

    def _compare(self, inputs: Tensor) -> Tensor:
        """Returns `M_G X`, of the shape of `X`: `(batch, height, width, channels)`."""
        if self.similarity == "predicted_mask":
            prediction = self.mask_output(ops.relu(self.mask_hidden(inputs)))
            mask = ops.cast(1 + at_least_float32(prediction), inputs.dtype)
            return mask * inputs  # NSL Eq. (10), M_G(X) = I + diag(P(X))
        shape = ops.shape(inputs)
        # X, or X_F with all channels in one column.
        columns = shape[3] if self.shared_by_channels else 1
        rows = shape[1] * shape[2] * (shape[3] // columns)
        features = ops.reshape(inputs, (shape[0], rows, columns))
        if self.similarity in STATIC:
            matrix = ops.cast(self.similarity_parameters, features.dtype)
            if self.similarity == "diagonal":
                product = matrix[:, None] * features  # NSL Eq. (9), M_G^s diagonal
            else:
                product = ops.matmul(matrix, features)  # NSL Eq. (8), (9)
            return ops.reshape(product, shape)
        # The unscaled sums over all positions are too large for half precision.
        query, key = map(at_least_float32, (self.query(features), self.key(features)))
        key = ops.swapaxes(key, 1, 2)
        if self.similarity == "attention":
            looked_up = ops.matmul(key, at_least_float32(features))
            product = ops.matmul(query, looked_up)  # NSL Eq. (11): G1(X) (G2(X)^T X)
            product = ops.cast(product, features.dtype)
        else:
            scores = ops.matmul(ops.relu(query), key)
            weights = ops.cast(ops.softmax(scores), features.dtype)
            attended = ops.matmul(weights, self.value(features))
            gamma = ops.cast(self.gamma, features.dtype)
            product = gamma * attended + features  # NSL Eq. (10), softmax attention
        return ops.reshape(product, shape)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "similarity": self.similarity,
            "regularizer": keras.regularizers.serialize(self.regularizer),
            "sphere": self.sphere,
            "data_format": self.data_format,
            "shared_by_channels": self.shared_by_channels,
        }
