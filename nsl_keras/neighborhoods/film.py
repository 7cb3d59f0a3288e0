"""iFiLM: feature maps scaled and shifted per example, by a small dictionary."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend.precision import at_least_float32
from nsl_keras.neighborhoods.unit_norm import unit_norm

Tensor = Any


@keras.saving.register_keras_serializable("nsl_keras")
class InstanceFiLM(keras.layers.Layer):
    """Instance-wise feature modulation: `y = (1 + w G) a + w B` per channel.

    The mean `g` of an example's feature map over space looks up a dictionary of its own,

        w = softmax_j(temperature * cos(g, k_j)),

    and the weights mix the scales `G` and shifts `B` of the entries. Both start at zero,
    so that the layer starts as the identity. Place it behind a batch norm.

    Args:
        dictionary_size: int, the number of entries.
        temperature: float above 0, the start value of the learned factor in front of the
            cosine.
        axis: int, the channel axis: -1, or 1 for `data_format="channels_first"`.
        key_initializer: Initializer of the keys; `None` is a normal distribution of
            standard deviation 0.05.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Input shape:
        `(batch, ..., channels)`, or `(batch, channels, ...)` with `axis=1`, with any
        number of spatial axes.

    Output shape:
        That of the input.

    Raises:
        ValueError: If `dictionary_size` or `temperature` is not positive, or the number
            of channels is unknown at build.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.InstanceFiLM(10)
    >>> tuple(layer(keras.ops.ones((2, 8, 8, 16))).shape)
    (2, 8, 8, 16)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.2, Eq. (4). The paper
        scales by `w G` with a fixed temperature; the residual form, the learned
        temperature and its start at 5 are those of the authors' code.
    """

    def __init__(
        self,
        dictionary_size: int = 10,
        temperature: float = 5.0,
        axis: int = -1,
        key_initializer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.dictionary_size = validation.positive_integer(
            dictionary_size, "dictionary_size"
        )
        self.temperature = validation.positive_number(temperature, "temperature")
        self.axis = validation.one_of(axis, (-1, 1), "axis")
        self.key_initializer = keras.initializers.get(
            key_initializer or keras.initializers.RandomNormal(stddev=0.05)
        )
        self.input_spec = keras.layers.InputSpec(min_ndim=2)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        channels = validation.known_axis(input_shape, self.axis, "channel axis")
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={self.axis: channels})
        shape = (self.dictionary_size, channels)
        self.keys = self.add_weight(
            name="keys", shape=shape, initializer=self.key_initializer, autocast=False
        )
        self.scales = self.add_weight(
            name="scales", shape=shape, initializer="zeros", autocast=False
        )
        self.shifts = self.add_weight(
            name="shifts", shape=shape, initializer="zeros", autocast=False
        )
        self.learned_temperature = self.add_weight(
            name="temperature",
            shape=(),
            initializer=keras.initializers.Constant(self.temperature),
            autocast=False,
        )

    def call(self, inputs: Tensor) -> Tensor:
        rank = len(inputs.shape)
        channel_axis = self.axis if self.axis > 0 else rank - 1
        space = tuple(axis for axis in range(1, rank) if axis != channel_axis)
        queries = at_least_float32(inputs)
        if space:
            queries = ops.mean(queries, axis=space)
        keys = ops.convert_to_tensor(self.keys)
        cosines = ops.matmul(unit_norm(queries), ops.transpose(unit_norm(keys)))
        weights = ops.softmax(self.learned_temperature * cosines)
        channels = inputs.shape[channel_axis]
        per_channel = [-1] + [1] * (rank - 1)
        per_channel[channel_axis] = channels
        scale = ops.reshape(1 + ops.matmul(weights, self.scales), per_channel)
        shift = ops.reshape(ops.matmul(weights, self.shifts), per_channel)
        return ops.cast(scale, inputs.dtype) * inputs + ops.cast(shift, inputs.dtype)

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "dictionary_size": self.dictionary_size,
            "temperature": self.temperature,
            "axis": self.axis,
            "key_initializer": keras.initializers.serialize(self.key_initializer),
        }
