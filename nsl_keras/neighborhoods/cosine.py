"""The cosine classifier."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.neighborhoods.key_metrics import inverse_norm


@keras.saving.register_keras_serializable("nsl_keras")
class CosineDense(keras.layers.Layer):
    """Dense layer of cosines: `y[c] = scale * cos(x, W[:, c])`.

    Each kernel column is the prototype of one output. The norms of inputs and prototypes
    have no effect; an all-zero input gives zeros. Cosines are computed in float32.

    Args:
        units: int, the number of outputs (classes).
        scale: float above 0, the initial value of the learned scale.
        kernel_initializer: Initializer of the kernel, of shape `(features, units)`.
        **kwargs: Arguments of `keras.layers.Layer`.

    Input shape:
        `(..., features)`.

    Output shape:
        `(..., units)`.

    Raises:
        ValueError: If `units` or `scale` is not above 0, or `features` is unknown at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.CosineDense(10)
    >>> logits = layer(keras.random.normal((4, 32), seed=0))
    >>> tuple(logits.shape), bool(keras.ops.max(keras.ops.abs(logits)) <= 10)
    ((4, 10), True)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.3, "Cosine-similarity
        Based Classification". The scale and its start at 10 follow the authors' code.
    """

    def __init__(
        self,
        units: int,
        scale: float = 10.0,
        kernel_initializer: Any = "glorot_uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.units = validation.positive_integer(units, "units")
        self.scale = validation.positive_number(scale, "scale")
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.input_spec = keras.layers.InputSpec(min_ndim=2)
        self.supports_masking = True

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        features = validation.known_axis(input_shape, -1, "last axis")
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: features})
        shape = (features, self.units)
        options = {"autocast": False}
        self.kernel = self.add_weight(
            shape, self.kernel_initializer, name="kernel", **options
        )
        start = keras.initializers.Constant(self.scale)
        self.learned_scale = self.add_weight((), start, name="scale", **options)
        # Trained on the outer loss, but not adapted by the inner loop.
        self.learned_scale.adapts = False

    def call(self, inputs: Tensor) -> Tensor:
        inputs = at_least_float32(inputs)
        kernel = ops.convert_to_tensor(self.kernel)
        scaled = self.learned_scale * kernel * inverse_norm(kernel, axis=0)
        outputs = ops.matmul(inputs * inverse_norm(inputs), scaled)
        return ops.cast(outputs, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        initializer = keras.saving.serialize_keras_object(self.kernel_initializer)
        own = {"units": self.units, "scale": self.scale, "kernel_initializer": initializer}
        return {**super().get_config(), **own}
