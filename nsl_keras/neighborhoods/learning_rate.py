"""The learning rate of the inner step: one number, one per input feature, or fixed.

Learned rates enter through their absolute value, and so stay non-negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32

FORMS = ("scalar", "diagonal", "fixed")


class InnerLearningRate(keras.layers.Layer):
    """Learning rates for a list of weights, one per weight, that broadcast against it.

    `"scalar"` is one learned number for all, `"diagonal"` one learned number for each row
    of a matrix and one for each vector, `"fixed"` the start value, not trained.
    """

    def __init__(self, initial: float, form: str = "scalar", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.initial = validation.positive_number(initial, "inner_learning_rate")
        self.form = validation.one_of(form, FORMS, "learning_rate_form")
        self.raw_rates: list[Any] = []

    def build_for(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Creates the rates for weights of these shapes."""
        if self.form == "scalar":
            rate_shapes: list[tuple[int, ...]] = [()]
        elif self.form == "diagonal":
            rate_shapes = [
                (shape[0], *(1 for _ in shape[1:])) if len(shape) > 1 else ()
                for shape in shapes
            ]
        else:
            rate_shapes = []
        self.raw_rates = [
            self.add_weight(
                name=f"inner_learning_rate_{index}",
                shape=shape,
                initializer=keras.initializers.Constant(self.initial),
                autocast=False,
            )
            for index, shape in enumerate(rate_shapes)
        ]
        self.num_weights = len(shapes)
        self.built = True

    def rates(self) -> list[Tensor]:
        """Returns the rates, in the order of the shapes given to `build_for`."""
        if self.form == "fixed":
            return [ops.convert_to_tensor(self.initial, self.variable_dtype)] * (
                self.num_weights
            )
        rates = [ops.abs(at_least_float32(raw)) for raw in self.raw_rates]
        return rates * self.num_weights if self.form == "scalar" else rates
