"""Global neural similarity: `M` couples the positions of a whole feature map.

Where the local similarity of the convolutions compares the taps under one kernel, this one
mixes all positions, self-attention among its forms, before a convolution sees them.
"""

from __future__ import annotations

import inspect
from typing import Any

import keras
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.similarity.comparison import is_identity
from nsl_keras.similarity.predictors import small_normal
from nsl_keras.similarity.sphere import SphereConv2D, SphereDense

STATIC = ("diagonal", "unconstrained")
SIMILARITIES = (*STATIC, "predicted_mask", "attention", "softmax_attention")

MASK_HIDDEN_FILTERS = 64


@keras.saving.register_keras_serializable("nsl_keras")
class GlobalNeuralSimilarity2D(keras.layers.Layer):
    """Global neural similarity (GNS): `M_G X`, and a convolution of that if asked for.

    With the feature map as a matrix `X` of `HW` positions (row-major) and `C` channels,

        F = W_G^T M_G X,    (M_G X)[p, c] = sum_q M[p, q] X[q, c]

    The block `M`, of shape `(HW, HW)`, is shared by all channels. `similarity` says what
    `M_G X` may be:

        "diagonal":           diag(m) X, with a learned spatial mask m
        "unconstrained":      M X, with a learned matrix
        "predicted_mask":     X + diag(P(X)) X, P = SphereConv(3x3) -> ReLU -> Conv(3x3, 1)
        "attention":          G1(X) G2(X)^T X, self-attention as such
        "softmax_attention":  X + gamma softmax(relu(G1(X)) G2(X)^T) G3(X)

    with 1x1 convolutions `G` and a learned scalar `gamma` that starts at zero. All but
    `"attention"` start as the identity: the mask's last kernel starts at zero. While
    `gamma` is zero the kernels of `G` have no gradient.

    `"attention"` is computed as `G1 (G2^T X)`, in time linear in `HW`;
    `"softmax_attention"` and `"unconstrained"` take time and memory of `(HW)^2`.

    Args:
        filters: int, the number of output channels of the convolution, or `None` for
            `M_G X` alone.
        kernel_size: int or tuple of 2 ints, height and width of the kernel; given with
            `filters`, and only then.
        similarity: One of the names above.
        similarity_initializer: Initializer of the learned `M`, called with the shape
            `(HW, HW)`; `"diagonal"` takes the diagonal of that. `"identity"` for the
            other similarities.
        similarity_regularizer: Regularizer of the similarity's weights: of the learned
            mask or matrix, or of each of the kernels that `M` is predicted with. None
            falls on `gamma`.
        similarity_constraint: Constraint on the learned mask or matrix; `None` for the
            other similarities.
        hidden_filters: int or `None`, the channels of `G1` and `G2`, or of the hidden
            layer of the mask's predictor. `None` is `C` for `"attention"`, `C // 8` for
            `"softmax_attention"` and 64 for `"predicted_mask"`.
        sphere: bool, whether `G1`, `G2`, `G3` are SphereConvs that divide by both norms,
            and the first layer of the mask's predictor one that divides by the input's;
            `False` for plain convolutions, with which trainings are less stable.
        data_format: `"channels_last"` or `"channels_first"`; defaults to
            `keras.config.image_data_format()`.
        **kwargs: The other arguments of `keras.layers.Conv2D`, by name. Without `filters`
            there is no convolution: only `name`, `dtype`, `trainable` and
            `activity_regularizer` have something to act on then.

    Input shape:
        `(batch, height, width, channels)` with `data_format="channels_last"`,
        `(batch, channels, height, width)` with `"channels_first"`. `"diagonal"` and
        `"unconstrained"` need a known height and width.

    Output shape:
        That of the input, or with `filters` that of the convolution:
        `(batch, new_height, new_width, filters)` or
        `(batch, filters, new_height, new_width)`.

    Raises:
        ValueError: For arguments outside the ranges above, `kernel_size` without
            `filters` or the reverse, options of a learned `M` for a predicted one, at
            construction; for an input of the wrong rank, of an unknown channel count or,
            with a learned `M`, size, or smaller than the kernel, at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> images = keras.random.normal((2, 8, 8, 16), seed=0)
    >>> block = nsl_keras.layers.GlobalNeuralSimilarity2D(similarity="softmax_attention")
    >>> bool(keras.ops.all(block(images) == images))  # The identity, at the start.
    True
    >>> masked = nsl_keras.layers.GlobalNeuralSimilarity2D(4, 3, similarity="diagonal")
    >>> tuple(masked(images).shape), [tuple(weight.shape) for weight in masked.weights]
    ((2, 6, 6, 4), [(64,), (3, 3, 16, 4), (4,)])

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Appendix B: Eq. (8) and (9),
        the learned forms; Eq. (10), the predicted ones; Eq. (11), `"attention"`.
        `"softmax_attention"` is the block of the authors' code, in which `G1` alone has a
        ReLU, `G1` and `G2` have `C / 8` channels, and the input is added. The paper leaves
        the mask's predictor open; this one follows its local predictors.
    """

    def __init__(
        self,
        filters: int | None = None,
        kernel_size: int | tuple[int, ...] | None = None,
        similarity: str = "diagonal",
        similarity_initializer: Any = "identity",
        similarity_regularizer: Any = None,
        similarity_constraint: Any = None,
        hidden_filters: int | None = None,
        sphere: bool = True,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        own = ("name", "dtype", "trainable", "activity_regularizer")
        super().__init__(**{name: kwargs.pop(name) for name in own if name in kwargs})
        self.filters = filters
        self.kernel_size = kernel_size
        self.similarity = validation.one_of(similarity, SIMILARITIES, "similarity")
        self.similarity_initializer = keras.initializers.get(similarity_initializer)
        self.similarity_regularizer = keras.regularizers.get(similarity_regularizer)
        self.similarity_constraint = keras.constraints.get(similarity_constraint)
        self.hidden_filters = validation.optional(
            validation.positive_integer, hidden_filters, "hidden_filters"
        )
        self.sphere = validation.boolean(sphere, "sphere")
        self.data_format = validation.one_of(
            data_format or keras.config.image_data_format(),
            ("channels_last", "channels_first"),
            "data_format",
        )
        self._check_similarity_arguments()
        self.convolution = self._make_convolution(kwargs)
        if self.convolution is not None:
            validation.geometry(self.convolution)
        self.input_spec = keras.layers.InputSpec(ndim=4)

    def _check_similarity_arguments(self) -> None:
        if self.similarity not in STATIC and not (
            is_identity(self.similarity_initializer) and self.similarity_constraint is None
        ):
            raise ValueError(
                "`similarity_initializer` and `similarity_constraint` apply to a learned "
                "M, 'diagonal' or 'unconstrained', and must be 'identity' and None with "
                f"others. Received: similarity={self.similarity!r}, "
                f"similarity_initializer={self.similarity_initializer}, "
                f"similarity_constraint={self.similarity_constraint}"
            )
        if self.similarity in STATIC and self.hidden_filters is not None:
            raise ValueError(
                "`hidden_filters` applies to a predicted M and must be None with a learned "
                f"one. Received: similarity={self.similarity!r}, "
                f"hidden_filters={self.hidden_filters}"
            )

    def _make_convolution(self, options: dict[str, Any]) -> keras.layers.Conv2D | None:
        if self.filters is None:
            unknown = set(options) - set(inspect.signature(keras.layers.Conv2D).parameters)
            if unknown:
                raise ValueError(
                    "Arguments must be those of the layer or of `keras.layers.Conv2D`. "
                    f"Received: {', '.join(sorted(unknown))}"
                )
            linear = keras.activations.linear
            unused = {"strides": 1, "dilation_rate": 1, "groups": 1, "activation": linear}
            given = {name: options.get(name, value) for name, value in unused.items()}
            given["activation"] = keras.activations.get(given["activation"])
            for name in ("strides", "dilation_rate"):
                if given[name] in ((1, 1), [1, 1]):
                    given[name] = 1
            if given != unused or self.kernel_size is not None:
                given = {"kernel_size": self.kernel_size, **given}
                raise ValueError(
                    "`kernel_size`, `strides`, `dilation_rate`, `groups` and `activation` "
                    "belong to the convolution and must be left out without `filters`. "
                    "Received: filters=None, "
                    + ", ".join(f"{name}={value!r}" for name, value in given.items())
                )
            return None
        if self.kernel_size is None:
            raise ValueError(
                "`kernel_size` must be given with `filters`. Received: "
                f"filters={self.filters!r}, kernel_size=None"
            )
        return keras.layers.Conv2D(
            self.filters,
            self.kernel_size,
            data_format="channels_last",
            dtype=self.dtype_policy,
            **{**options, "name": "convolution"},
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        validation.rank(input_shape, 4)
        channel_axis = -1 if self.data_format == "channels_last" else 1
        channels = validation.known_axis(input_shape, channel_axis, "channel axis")
        axes = {channel_axis: channels}
        shape = _channels_last(tuple(input_shape), self.data_format)
        if self.similarity in STATIC:
            if shape[1] is None or shape[2] is None:
                raise ValueError(
                    "The height and width of the input must be known for the learned "
                    f"similarity {self.similarity!r}, whose weights belong to positions. "
                    f"Received: input_shape={tuple(input_shape)}"
                )
            first = 1 if self.data_format == "channels_last" else 2
            axes |= {first: shape[1], first + 1: shape[2]}
            self._build_learned(shape[1] * shape[2])
        elif self.similarity == "predicted_mask":
            self._build_mask_predictor(shape)
        else:
            self._build_attention(channels)
        self.input_spec = keras.layers.InputSpec(ndim=4, axes=axes)
        if self.convolution is not None:
            self.convolution.build(shape)
        rewiring.pass_on_frozen(self)

    def _build_learned(self, positions: int) -> None:
        diagonal = self.similarity == "diagonal"

        def initial_weights(shape: tuple[int, ...], dtype: Any) -> Tensor:
            initializer = self.similarity_initializer
            if diagonal and isinstance(initializer, keras.initializers.Identity):
                # The matrix itself would have (HW)^2 entries.
                return initializer.gain * ops.ones(shape, dtype=dtype)
            matrix = initializer((positions, positions), dtype=dtype)
            return ops.diagonal(matrix) if diagonal else matrix

        self.similarity_parameters = self.add_weight(
            name="similarity",
            shape=(positions,) if diagonal else (positions, positions),
            initializer=initial_weights,
            regularizer=self.similarity_regularizer,
            constraint=self.similarity_constraint,
        )

    def _build_mask_predictor(self, input_shape: tuple[int | None, ...]) -> None:
        options = {
            "padding": "same",
            "data_format": "channels_last",
            "use_bias": False,
            "kernel_regularizer": self.similarity_regularizer,
            "dtype": self.dtype_policy,
        }
        hidden_options = {
            **options,
            "kernel_initializer": small_normal(0.1),
            "name": "mask_hidden",
        }
        filters = self.hidden_filters or MASK_HIDDEN_FILTERS
        self.mask_hidden = (
            SphereConv2D(filters, 3, normalize="input", **hidden_options)
            if self.sphere
            else keras.layers.Conv2D(filters, 3, **hidden_options)
        )
        self.mask_output = keras.layers.Conv2D(
            1, 3, kernel_initializer="zeros", name="mask_output", **options
        )
        self.mask_hidden.build(input_shape)
        self.mask_output.build(self.mask_hidden.compute_output_shape(input_shape))

    def _build_attention(self, channels: int) -> None:
        softmax = self.similarity == "softmax_attention"
        hidden = self.hidden_filters or (max(channels // 8, 1) if softmax else channels)
        dense = SphereDense if self.sphere else keras.layers.Dense

        def transform(units: int, name: str) -> keras.layers.Layer:
            # A dense layer on every position is a 1x1 convolution.
            layer = dense(
                units,
                use_bias=False,
                kernel_initializer=small_normal(1.0),
                kernel_regularizer=self.similarity_regularizer,
                dtype=self.dtype_policy,
                name=name,
            )
            layer.build((None, None, channels))
            return layer

        self.query = transform(hidden, "query")
        self.key = transform(hidden, "key")
        if softmax:
            self.value = transform(channels, "value")
            self.gamma = self.add_weight(name="gamma", shape=(), initializer="zeros")

    def call(self, inputs: Tensor) -> Tensor:
        # All is computed with channels last. `keras.layers.Conv2D` with channels first adds
        # the bias along the width, on TensorFlow, where that equals `filters` (Keras 3.15).
        inputs = ops.cast(inputs, self.compute_dtype)  # Of integers too.
        first = self.data_format == "channels_first"
        features = ops.moveaxis(inputs, 1, -1) if first else inputs
        outputs = self._compare(features)
        if self.convolution is not None:
            outputs = self.convolution(outputs)  # NSL Eq. (8): W_G^T M_G X_F
        return ops.moveaxis(outputs, -1, 1) if first else outputs

    def _compare(self, inputs: Tensor) -> Tensor:
        """Returns `M_G X`, of the shape of `X`: `(batch, height, width, channels)`."""
        if self.similarity == "predicted_mask":
            # NSL Eq. (10), with a diagonal M_G(X) = I + diag(P(X))
            prediction = self.mask_output(ops.relu(self.mask_hidden(inputs)))
            return inputs * ops.cast(1 + at_least_float32(prediction), inputs.dtype)
        shape = ops.shape(inputs)
        features = ops.reshape(inputs, (shape[0], shape[1] * shape[2], shape[3]))
        if self.similarity == "diagonal":
            matrix = ops.cast(self.similarity_parameters, features.dtype)
            compared = matrix[:, None] * features  # NSL Eq. (9), M_G^s diagonal
        elif self.similarity == "unconstrained":
            matrix = ops.cast(self.similarity_parameters, features.dtype)
            compared = ops.matmul(matrix, features)  # NSL Eq. (9)
        elif self.similarity == "attention":
            # Sums over all positions, unscaled: too large for half precision.
            query, key, values = map(
                at_least_float32, (self.query(features), self.key(features), features)
            )
            looked_up = ops.matmul(ops.swapaxes(key, 1, 2), values)
            compared = ops.matmul(query, looked_up)  # NSL Eq. (11): G1(X) (G2(X)^T X)
            compared = ops.cast(compared, features.dtype)
        else:
            query, key = ops.relu(self.query(features)), self.key(features)
            scores = ops.matmul(query, ops.swapaxes(key, 1, 2))
            weights = ops.cast(ops.softmax(at_least_float32(scores)), features.dtype)
            attended = ops.matmul(weights, self.value(features))
            compared = ops.cast(self.gamma, features.dtype) * attended + features
        return ops.reshape(compared, shape)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        if self.convolution is None:
            return tuple(input_shape)
        shape = self.convolution.compute_output_shape(
            _channels_last(tuple(input_shape), self.data_format)
        )
        if self.data_format == "channels_last":
            return shape
        batch, height, width, filters = shape
        return (batch, filters, height, width)

    def get_config(self) -> dict[str, Any]:
        return {
            **({} if self.convolution is None else self.convolution.get_config()),
            **super().get_config(),
            "filters": self.filters,
            "kernel_size": self.kernel_size,
            "similarity": self.similarity,
            "similarity_initializer": keras.initializers.serialize(
                self.similarity_initializer
            ),
            "similarity_regularizer": keras.regularizers.serialize(
                self.similarity_regularizer
            ),
            "similarity_constraint": keras.constraints.serialize(
                self.similarity_constraint
            ),
            "hidden_filters": self.hidden_filters,
            "sphere": self.sphere,
            "data_format": self.data_format,
        }


def _channels_last(
    shape: tuple[int | None, ...], data_format: str
) -> tuple[int | None, ...]:
    if data_format == "channels_last":
        return shape
    batch, channels, height, width = shape
    return (batch, height, width, channels)
