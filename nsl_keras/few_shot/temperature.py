"""A temperature: what similarities are divided by, fixed or learned."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor


class Temperature(keras.layers.Layer):
    """Divides by a number above 0. A learned one is kept as its logarithm."""

    def __init__(self, initial: float, learned: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.initial = validation.positive_number(initial, "temperature")
        self.learned = validation.one_of(learned, (True, False), "learn_temperature")

    def build(self, input_shape: Any = None) -> None:
        if self.learned:
            self.log_temperature = self.add_weight(
                name="log_temperature",
                shape=(),
                initializer=keras.initializers.Constant(math.log(self.initial)),
                autocast=False,
            )

    def call(self, inputs: Tensor) -> Tensor:
        if not self.learned:
            return inputs / self.initial
        factor = ops.exp(-ops.convert_to_tensor(self.log_temperature))
        return inputs * ops.cast(factor, inputs.dtype)
