"""Checks how exact the second derivatives of a model are, which MAML trains through."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, gradients_of
from nsl_keras.few_shot.functional import FunctionalModel


def check_second_order(
    model: keras.Model, x: Any, step: float = 1e-3, seed: int = 0
) -> float:
    """Returns the relative error of a model's second derivatives along one direction.

    Some TensorFlow operations have no second derivative, and a tape leaves this part out
    without an error. With the loss `L = mean(outputs^2)`, the weights `w` and a
    random direction `d`,

        exact    = d . (gradient of (d . gradient of L))  at w
        measured = (d . gradient of L at w + h d  -  the same at w - h d) / (2 h)
        error    = |exact - measured| / max(|exact|, |measured|)

    Below about 0.01 the derivatives are exact, at 1 they are missing. A network with kinks
    (ReLU, max pooling) measures more than its true error in float32: build it in float64,
    by `keras.config.set_dtype_policy("float64")`, with a `step` of 1e-6.

    Args:
        model: A built model, which runs in inference mode.
        x: Batch of the model's inputs; two examples suffice.
        step: float, `h` relative to the length of the weights.
        seed: int, fixes the direction.

    Example:

    >>> import keras
    >>> from nsl_keras import few_shot
    >>> smooth = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh")])
    >>> few_shot.check_second_order(smooth, keras.ops.ones((2, 3))) < 0.01
    True
    """
    validation.built(model, "check_second_order")
    functional = FunctionalModel(model, model.trainable_variables, "moving")
    start = [*map(ops.convert_to_numpy, functional.values())]
    draw = np.random.default_rng(seed).normal
    drawn = [draw(size=each.shape) for each in start]
    own, other = (np.sqrt(sum(np.sum(v**2) for v in each)) for each in (start, drawn))
    pairs = zip(start, drawn, strict=True)
    along = [(own / other * way).astype(each.dtype) for each, way in pairs]

    def loss(values: list[Tensor]) -> tuple[Tensor, None]:
        return ops.mean(ops.square(functional.outputs(values, x)[0])), None

    def product(tensors: list[Tensor]) -> Tensor:
        return sum(ops.sum(each * way) for each, way in zip(tensors, along, strict=True))

    def slope(values: list[Tensor]) -> tuple[Tensor, None]:
        return product(gradients_of(loss, values)[0]), None

    def moved(share: float) -> list[Tensor]:
        pairs = zip(start, along, strict=True)
        return [ops.convert_to_tensor(each + share * way) for each, way in pairs]

    exact = float(product(gradients_of(slope, moved(0))[0]))
    measured = float(slope(moved(step))[0] - slope(moved(-step))[0]) / (2 * step)
    return abs(exact - measured) / (max(abs(exact), abs(measured)) or 1.0)
