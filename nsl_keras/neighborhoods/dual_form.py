"""Per-example finetuning of dense heads as attention over the dictionary: exact.

One forward and one backward pass on the dictionary, shared by all examples, give for each
dense layer its inputs `A` (rows `a_j`) and the loss's gradients `D` (rows `d_j`) with
respect to its outputs. One inner step for the example with attention `w` then is

    (W - rate * sum_j w_j a_j d_j^T)^T h  =  W^T h - [w * (A (rate * h))] D

so that the finetuned layer costs O(S * (inputs + outputs)) an example, without weights of
its own. A cosine layer needs the norm of its finetuned columns besides, which takes the
weights themselves. Steps after the first start from per-example weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from nsl_keras.backend.gradients import gradients_of
from nsl_keras.backend.precision import at_least_float32
from nsl_keras.neighborhoods.cosine_dense import CosineDense
from nsl_keras.neighborhoods.unit_norm import NORM_EPSILON, inverse_norm, unit_norm

Tensor = Any


@dataclasses.dataclass(frozen=True)
class DenseStage:
    """One layer of a head, as the dual form sees it: `activation(x W + b)`, or cosines.

    Attributes:
        layer: The `Dense` or `CosineDense` layer.
        activation: What follows the linear map; `None` for nothing.
    """

    layer: keras.layers.Layer
    activation: Callable[[Tensor], Tensor] | None

    @property
    def is_cosine(self) -> bool:
        return isinstance(self.layer, CosineDense)

    @property
    def variables(self) -> list[Any]:
        """The variables that adapt: the kernel, and a dense layer's bias."""
        bias = None if self.is_cosine else self.layer.bias
        return [self.layer.kernel] if bias is None else [self.layer.kernel, bias]

    @property
    def scale(self) -> Tensor:
        """The factor in front of the cosines; not adapted."""
        return ops.convert_to_tensor(self.layer.learned_scale)

    def activate(self, outputs: Tensor) -> Tensor:
        return outputs if self.activation is None else self.activation(outputs)


class NoDualFormError(ValueError):
    """A head that the dual form cannot treat; the message names the layer."""


def stages_of(head: keras.layers.Layer) -> list[DenseStage]:
    """Returns the dense stages of a head: a layer, or a `Sequential` of them.

    Args:
        head: `Dense`, `CosineDense`, or a `keras.Sequential` of these and of
            `Activation` and `ReLU` layers.

    Raises:
        NoDualFormError: If the head holds anything else; the message names the layer.
    """
    layers = head.layers if isinstance(head, keras.Sequential) else [head]
    stages: list[DenseStage] = []
    for layer in layers:
        if not layer.trainable:
            raise NoDualFormError(f"layer {layer.name!r} is not trainable")
        if layer.activity_regularizer is not None:
            raise NoDualFormError(f"layer {layer.name!r} has an activity regularizer")
        if type(layer) is CosineDense:
            stages.append(DenseStage(layer, None))
        elif type(layer) is keras.layers.Dense:
            if getattr(layer, "lora_enabled", False) or layer.quantization_mode:
                raise NoDualFormError(
                    f"layer {layer.name!r} is quantized or has a low-rank update"
                )
            stages.append(DenseStage(layer, layer.activation))
        elif stages and type(layer) is keras.layers.Activation:
            stages[-1] = _followed_by(stages[-1], layer.activation)
        elif stages and type(layer) is keras.layers.ReLU:
            stages[-1] = _followed_by(stages[-1], layer)
        else:
            raise NoDualFormError(
                f"layer {layer.name!r} is a {type(layer).__name__}, not a Dense or "
                "CosineDense layer (or an activation behind one)"
            )
    if not stages:
        raise NoDualFormError(f"head {head.name!r} has no layers")
    return stages


def _followed_by(stage: DenseStage, activation: Callable[..., Tensor]) -> DenseStage:
    return dataclasses.replace(
        stage, activation=lambda outputs: activation(stage.activate(outputs))
    )


@dataclasses.dataclass(frozen=True)
class _Trace:
    """What one stage saw on the dictionary: its inputs and its outputs' gradients.

    Both have shape `(entries, ...)` while all examples share the weights, and
    `(batch, entries, ...)` after.
    """

    inputs: Tensor
    gradients: Tensor


#: Weights of a stage: `[kernel]` or `[kernel, bias]`, with a batch axis once adapted.
_Weights = list[Tensor]


def adapted_outputs(
    stages: list[DenseStage],
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
        stages: The head, from `stages_of`.
        keys: Dictionary keys, of shape `(entries, features)`.
        values: Dictionary values, of shape `(entries, outputs)`.
        attention: Weights of the entries, of shape `(batch, entries)`.
        queries: Features, of shape `(batch, features)`.
        rates: One learning rate per adapted variable, in the stages' order.
        steps: Number of inner steps, at least 1.
        loss: Inner loss `loss(values, outputs)`, per entry.

    Returns:
        Tensor of shape `(batch, outputs)`.
    """
    stage_rates = _by_stage(stages, rates)
    weights = _shared_weights(stages)
    for _ in range(steps - 1):
        weights = _step(stages, weights, keys, values, attention, stage_rates, loss)
    traces = _traces(stages, weights, keys, values, loss)
    outputs = queries
    for stage, stage_weights, trace, stage_rate in zip(
        stages, weights, traces, stage_rates, strict=True
    ):
        if stage.is_cosine:
            (kernel,) = _updated(stage, stage_weights, trace, attention, stage_rate)
            products = _apply(unit_norm(outputs), kernel)
            outputs = stage.scale * products * inverse_norm(kernel, -2)[..., 0, :]
        else:
            outputs = _attend(outputs, stage_weights, trace, attention, stage_rate)
        outputs = stage.activate(outputs)
    return outputs


def adapted_weights(
    stages: list[DenseStage],
    keys: Tensor,
    values: Tensor,
    attention: Tensor,
    rates: list[Tensor],
    steps: int,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> list[Tensor]:
    """Returns each example's finetuned variables, each with a leading batch axis.

    Args:
        stages: The head, from `stages_of`.
        keys: Dictionary keys, of shape `(entries, features)`.
        values: Dictionary values, of shape `(entries, outputs)`.
        attention: Weights of the entries, of shape `(batch, entries)`.
        rates: One learning rate per adapted variable, in the stages' order.
        steps: Number of inner steps, at least 1.
        loss: Inner loss `loss(values, outputs)`, per entry.

    Returns:
        List of tensors of shape `(batch, *variable_shape)`.
    """
    stage_rates = _by_stage(stages, rates)
    weights = _shared_weights(stages)
    for _ in range(steps):
        weights = _step(stages, weights, keys, values, attention, stage_rates, loss)
    return [tensor for stage_weights in weights for tensor in stage_weights]


def _shared_weights(stages: list[DenseStage]) -> list[_Weights]:
    return [
        [at_least_float32(variable) for variable in stage.variables] for stage in stages
    ]


def _by_stage(stages: list[DenseStage], rates: list[Tensor]) -> list[list[Tensor]]:
    remaining = iter(rates)
    return [[next(remaining) for _ in stage.variables] for stage in stages]


def _step(
    stages: list[DenseStage],
    weights: list[_Weights],
    keys: Tensor,
    values: Tensor,
    attention: Tensor,
    rates: list[list[Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> list[_Weights]:
    """One inner step for every stage, with per-example weights as result."""
    traces = _traces(stages, weights, keys, values, loss)
    return [
        _updated(stage, stage_weights, trace, attention, rate)
        for stage, stage_weights, trace, rate in zip(
            stages, weights, traces, rates, strict=True
        )
    ]


def _traces(
    stages: list[DenseStage],
    weights: list[_Weights],
    keys: Tensor,
    values: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> list[_Trace]:
    """One forward and one backward pass of the head over the dictionary.

    Entries do not touch each other, so the gradient of the summed losses with respect to
    offsets of a stage's outputs is each entry's own.
    """

    def total_loss(offsets: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        seen = []
        outputs = keys
        for stage, stage_weights, offset in zip(stages, weights, offsets, strict=True):
            if stage.is_cosine:
                inputs = stage.scale * unit_norm(outputs)
                outputs = ops.matmul(inputs, unit_norm(stage_weights[0], axis=-2))
            else:
                inputs = outputs
                outputs = ops.matmul(inputs, stage_weights[0])
                if len(stage_weights) > 1:
                    bias = stage_weights[1]
                    outputs = outputs + (bias if bias.ndim == 1 else bias[:, None])
            seen.append(inputs)
            outputs = stage.activate(outputs + offset)
        return ops.sum(loss(values, outputs)), seen

    batch = ops.shape(weights[0][0])[:-2]
    zeros = [
        ops.zeros((*batch, keys.shape[0], stage_weights[0].shape[-1]), keys.dtype)
        for stage_weights in weights
    ]
    gradients, inputs = gradients_of(total_loss, zeros)
    return [_Trace(*pair) for pair in zip(inputs, gradients, strict=True)]


def _updated(
    stage: DenseStage,
    weights: _Weights,
    trace: _Trace,
    attention: Tensor,
    rates: list[Tensor],
) -> _Weights:
    """The stage's weights after one step, per example."""
    kernel = weights[0]
    # sum_j w_j a_j d_j^T, as one product over the entries.
    weighted = attention[:, None, :] * ops.swapaxes(trace.gradients, -1, -2)
    if trace.inputs.ndim == 2:
        rows, columns = ops.shape(weighted)[:2]
        flat = ops.reshape(weighted, (-1, weighted.shape[-1]))
        product = ops.reshape(ops.matmul(flat, trace.inputs), (rows, columns, -1))
    else:
        product = ops.matmul(weighted, trace.inputs)
    gradient = ops.swapaxes(product, -1, -2)
    if stage.is_cosine:
        # From the unit columns back to the columns themselves.
        columns = unit_norm(kernel, axis=-2)
        radial = ops.sum(columns * gradient, axis=-2, keepdims=True)
        squares = ops.sum(ops.square(kernel), axis=-2, keepdims=True)
        inside = ops.cast(squares > NORM_EPSILON, kernel.dtype)
        gradient = (gradient - inside * radial * columns) * inverse_norm(kernel, -2)
    updated = [kernel - rates[0] * gradient]
    if len(weights) > 1:
        updated.append(weights[1] - rates[1] * ops.sum(weighted, axis=-1))
    return updated


def _attend(
    inputs: Tensor,
    weights: _Weights,
    trace: _Trace,
    attention: Tensor,
    rates: list[Tensor],
) -> Tensor:
    """A dense stage after one more step, on one input an example: the dual form."""
    rate = rates[0] if rates[0].ndim == 0 else rates[0][:, 0]
    scored = attention * _score(rate * inputs, trace.inputs)
    outputs = _apply(inputs, weights[0])
    if len(weights) > 1:
        scored = scored + rates[1] * attention
        outputs = outputs + weights[1]
    return outputs - _apply(scored, trace.gradients)


def _apply(rows: Tensor, matrix: Tensor) -> Tensor:
    """Row times matrix, the matrix shared or one a row."""
    if matrix.ndim == 2:
        return ops.matmul(rows, matrix)
    return ops.matmul(rows[:, None, :], matrix)[:, 0]


def _score(rows: Tensor, entries: Tensor) -> Tensor:
    """Inner products of each row with all entries, shared or one set a row."""
    return _apply(rows, ops.swapaxes(entries, -1, -2))
