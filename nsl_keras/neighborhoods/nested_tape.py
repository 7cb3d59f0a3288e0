"""Per-example finetuning of any head: a nested tape, vectorised over the examples.

It holds one set of head weights and activations per example, so memory grows with batch
size, dictionary size and steps. `dual_form` gives the same for dense heads at a fraction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from nsl_keras.backend import Tensor, gradients_of


def adapted_variables(head: keras.layers.Layer) -> list[Any]:
    """Returns the variables of a head that the inner loop changes.

    They are its trainable variables, less those that a layer marks with
    `variable.adapts = False`, as `CosineDense` does with its scale.
    """
    return [
        variable
        for variable in head.trainable_variables
        if getattr(variable, "adapts", True)
    ]


def adapted_outputs(
    head: keras.layers.Layer,
    keys: Tensor,
    values: Tensor,
    attention: Tensor,
    queries: Tensor,
    rates: list[Tensor],
    steps: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Returns what the head, finetuned for each example, computes on that example.

    Args:
        head: Any built Keras layer or model without non-trainable variables.
        keys: Dictionary keys, of shape `(entries, features)`.
        values: Dictionary values, of shape `(entries, outputs)`.
        attention: Weights of the entries, of shape `(batch, entries)`.
        queries: Features, of shape `(batch, features)`.
        rates: One learning rate per adapted variable.
        steps: Number of inner steps, at least 1.
        loss: Inner loss `loss(values, outputs)`, per entry.

    Returns:
        Tensor of shape `(batch, outputs)`.
    """
    adapt = _adaptation(head, keys, values, rates, steps, loss)

    def predict_one(example: tuple[Tensor, Tensor]) -> Tensor:
        query, weights_of_entries = example
        return _call(head, adapt(weights_of_entries), query[None])[0]

    return ops.vectorized_map(predict_one, (queries, attention))


def adapted_weights(
    head: keras.layers.Layer,
    keys: Tensor,
    values: Tensor,
    attention: Tensor,
    rates: list[Tensor],
    steps: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> list[Tensor]:
    """Returns each example's finetuned variables, each with a leading batch axis.

    Args:
        head: Any built Keras layer or model without non-trainable variables.
        keys: Dictionary keys, of shape `(entries, features)`.
        values: Dictionary values, of shape `(entries, outputs)`.
        attention: Weights of the entries, of shape `(batch, entries)`.
        rates: One learning rate per adapted variable.
        steps: Number of inner steps, at least 1.
        loss: Inner loss `loss(values, outputs)`, per entry.

    Returns:
        List of tensors of shape `(batch, *variable_shape)`.
    """
    adapt = _adaptation(head, keys, values, rates, steps, loss)
    return list(ops.vectorized_map(lambda one: tuple(adapt(one)), attention))


def _adaptation(
    head: keras.layers.Layer,
    keys: Tensor,
    values: Tensor,
    rates: list[Tensor],
    steps: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor], list[Tensor]]:
    """Returns the function from one example's attention to its finetuned variables."""

    def adapt(attention: Tensor) -> list[Tensor]:
        weights = [ops.convert_to_tensor(v) for v in adapted_variables(head)]
        for _ in range(steps):

            def inner_loss(at: list[Tensor]) -> tuple[Tensor, None]:
                losses = loss(values, _call(head, at, keys))
                return ops.sum(attention * losses), None

            gradients, _nothing = gradients_of(inner_loss, weights)
            weights = [
                weight - rate * gradient
                for weight, rate, gradient in zip(weights, rates, gradients, strict=True)
            ]
        return weights

    return adapt


def _call(head: keras.layers.Layer, weights: list[Tensor], inputs: Tensor) -> Tensor:
    """Calls the head with other values for the adapted variables."""
    given = {
        id(variable): weight
        for variable, weight in zip(adapted_variables(head), weights, strict=True)
    }
    trainable = [
        given[id(variable)] if id(variable) in given else ops.convert_to_tensor(variable)
        for variable in head.trainable_variables
    ]
    outputs, _ = head.stateless_call(
        trainable, [v.value for v in head.non_trainable_variables], inputs
    )
    return outputs
