"""The last layer of an adapted classifier: names of classes, and a temperature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32, wide_dtype


@keras.saving.register_keras_serializable("nsl_keras")
class ClassLogits(keras.layers.Layer):
    """Logits of named classes, divided by a temperature: `outputs = inputs / temperature`.

    It is the last layer of the classifiers that `adapt` returns. Because the temperature
    is a weight, `calibrate` also changes the predictions of a model that has predicted.

    Args:
        class_names: Names of the classes, in the order of the logits.
        temperature: float above 0.
        **kwargs: Arguments of `keras.layers.Layer`.

    Input shape:
        `(..., classes)`.

    Output shape:
        Same as the input, in float32 or wider.

    Raises:
        ValueError: If `temperature` is not above 0.

    Example:

    >>> import keras
    >>> from nsl_keras import few_shot
    >>> layer = few_shot.ClassLogits(["elk", "owl"])
    >>> layer.calibrate(2.0)
    >>> logits = layer(keras.ops.convert_to_tensor([[4.0, 2.0]]))
    >>> keras.ops.convert_to_numpy(logits).tolist(), layer.class_names
    ([[2.0, 1.0]], ('elk', 'owl'))

    Reference:
        On Calibration of Modern Neural Networks (Guo et al., ICML 2017), Section 4.2,
        "Temperature scaling".
    """

    def __init__(
        self, class_names: Sequence[str], temperature: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__(autocast=False, **kwargs)
        self.class_names = tuple(class_names)
        temperature = validation.positive_number(temperature, "temperature")
        # Here, because it has no input shape to wait for.
        self.divisor = self.add_weight(
            (),
            keras.initializers.Constant(temperature),
            dtype="float32",
            trainable=False,
            autocast=False,
            name="temperature",
        )

    @property
    def temperature(self) -> float:
        """The number by which logits are divided."""
        return float(self.divisor)

    def calibrate(self, temperature: float) -> None:
        """Divides the logits by another temperature from now on."""
        self.divisor.assign(validation.positive_number(temperature, "temperature"))

    def call(self, inputs: Tensor) -> Tensor:
        inputs = at_least_float32(inputs)
        return inputs / ops.cast(self.divisor, inputs.dtype)

    def fold(self) -> keras.layers.Rescaling:
        """Returns a plain Keras layer that computes the same, without the names."""
        dtype = wide_dtype(self.variable_dtype)
        return keras.layers.Rescaling(1 / self.temperature, dtype=dtype, name=self.name)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "class_names": [*self.class_names],
            "temperature": self.temperature,
        }
