"""Per-example finetuning of dense heads as attention over the dictionary: exact.

One forward and one backward pass on the dictionary, shared by all examples, give for each
dense layer its inputs `A` (rows `a_j`) and the loss's gradients `D` (rows `d_j`) with
respect to its outputs. One inner step for the example with attention `w` then is

    (W - rate * sum_j w_j a_j d_j^T)^T h  =  W^T h - [w * (A (rate * h))] D

so that the finetuned layer costs O(S * (inputs + outputs)) an example, without weights of
its own. A cosine layer needs the norm of its finetuned columns besides, which takes the
weights themselves: one large product, made from chunks of entries that stay in the
processor's cache. Several steps take per-example weights for every layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from nsl_keras.backend import Tensor, at_least_float32, gradients_of, sum_over_chunks
from nsl_keras.neighborhoods.cosine_dense import CosineDense
from nsl_keras.neighborhoods.unit_norm import NORM_EPSILON, inverse_norm, unit_norm

InnerLoss = Callable[[Tensor, Tensor], Tensor]

#: A good number of entries for a chunk: with 128 examples and 10 classes its terms take
#: 2.5 MB, and stay in the processor's cache.
CACHED_ENTRIES = 512


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

    The inputs have shape `(entries, inputs)`, the gradients `(entries, outputs)`, each
    with a batch axis in front where they depend on weights of an example.
    """

    inputs: Tensor
    gradients: Tensor


#: Weights of a stage: its columns, of shape `(outputs, inputs)`, that is, the transposed
#: kernel, and perhaps the bias; with a batch axis in front once adapted.
_Weights = list[Tensor]


def adapted_outputs(
    stages: list[DenseStage],
    keys: Tensor,
    values: Tensor,
    attention: Tensor,
    queries: Tensor,
    rates: list[Tensor],
    steps: int,
    loss: InnerLoss,
    chunk_size: int,
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
        chunk_size: Number of entries whose terms for all examples are held at once, in
            the forward pass and, made anew, in the backward pass.

    Returns:
        Tensor of shape `(batch, outputs)`.
    """
    stage_rates = _by_stage(stages, rates)
    weights = _shared_weights(stages)
    outputs = queries
    if steps > 1:
        for _ in range(steps):
            weights = _step(
                stages, weights, keys, values, attention, stage_rates, loss, chunk_size
            )
        for stage, own in zip(stages, weights, strict=True):
            outputs = stage.activate(_adapted(stage, own, outputs))
        return outputs
    traces = _traces(stages, weights, _scales(stages), keys, values, loss)
    for stage, own, trace, rate in zip(stages, weights, traces, stage_rates, strict=True):
        if stage.is_cosine:
            sums = _sums_of_trace(trace, attention, chunk_size)
            outputs = _adapted(stage, _updated(stage, own, sums, rate), outputs)
        else:
            outputs = _attend(own, trace, attention, rate, outputs)
        outputs = stage.activate(outputs)
    return outputs


def adapted_weights(
    stages: list[DenseStage],
    keys: Tensor,
    values: Tensor,
    attention: Tensor,
    rates: list[Tensor],
    steps: int,
    loss: InnerLoss,
    chunk_size: int,
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
        chunk_size: As in `adapted_outputs`.

    Returns:
        List of tensors of shape `(batch, *variable_shape)`.
    """
    stage_rates = _by_stage(stages, rates)
    weights = _shared_weights(stages)
    for _ in range(steps):
        weights = _step(
            stages, weights, keys, values, attention, stage_rates, loss, chunk_size
        )
    return [
        tensor
        for columns, *bias in weights
        for tensor in (ops.swapaxes(columns, -1, -2), *bias)
    ]


def _shared_weights(stages: list[DenseStage]) -> list[_Weights]:
    """The weights from which all examples start."""
    weights = []
    for stage in stages:
        kernel, *bias = [at_least_float32(variable) for variable in stage.variables]
        weights.append([ops.transpose(kernel), *bias])
    return weights


def _scales(stages: list[DenseStage]) -> list[Tensor]:
    """The factors in front of the cosines; not adapted."""
    return [at_least_float32(s.layer.learned_scale) for s in stages if s.is_cosine]


def _by_stage(stages: list[DenseStage], tensors: list[Tensor]) -> list[list[Tensor]]:
    """Splits a list with one item per variable into one list per stage."""
    remaining = iter(tensors)
    return [[next(remaining) for _ in stage.variables] for stage in stages]


def _step(
    stages: list[DenseStage],
    weights: list[_Weights],
    keys: Tensor,
    values: Tensor,
    attention: Tensor,
    rates: list[list[Tensor]],
    loss: InnerLoss,
    chunk_size: int,
) -> list[_Weights]:
    """One inner step for every stage, with per-example weights as result."""
    scales = _scales(stages)

    def terms(shared: list[Tensor], chunk: list[Tensor]) -> list[Tensor]:
        keys, values, attention = chunk
        weights = _by_stage(stages, shared[len(scales) :])
        traces = _traces(stages, weights, shared[: len(scales)], keys, values, loss)
        return [
            total
            for own, trace in zip(weights, traces, strict=True)
            for total in _weighted_sums(trace, attention)[: len(own)]
        ]

    sums = sum_over_chunks(
        terms,
        [*scales, *(tensor for own in weights for tensor in own)],
        [keys, values, attention],
        axes=(0, 0, 1),
        chunk_size=chunk_size,
    )
    by_stage = zip(stages, weights, _by_stage(stages, sums), rates, strict=True)
    return [_updated(stage, own, total, rate) for stage, own, total, rate in by_stage]


def _traces(
    stages: list[DenseStage],
    weights: list[_Weights],
    scales: list[Tensor],
    keys: Tensor,
    values: Tensor,
    loss: InnerLoss,
) -> list[_Trace]:
    """One forward and one backward pass of the head over the dictionary.

    Entries do not touch each other, so the gradient of the summed losses with respect to
    offsets of a stage's outputs is each entry's own.
    """

    def total_loss(offsets: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        seen = []
        remaining = iter(scales)
        outputs = keys
        for stage, (columns, *bias), offset in zip(stages, weights, offsets, strict=True):
            if stage.is_cosine:
                outputs = next(remaining) * unit_norm(outputs)
                columns = unit_norm(columns)
            seen.append(outputs)
            outputs = ops.matmul(outputs, ops.swapaxes(columns, -1, -2)) + offset
            for tensor in bias:
                outputs = outputs + tensor[..., None, :]
            outputs = stage.activate(outputs)
        return ops.sum(loss(values, outputs)), seen

    batch = ops.shape(weights[0][0])[:-2]
    zeros = [
        ops.zeros((*batch, keys.shape[0], columns.shape[-2]), keys.dtype)
        for columns, *_ in weights
    ]
    gradients, inputs = gradients_of(total_loss, zeros)
    return [_Trace(*pair) for pair in zip(inputs, gradients, strict=True)]


def _weighted_sums(trace: _Trace, attention: Tensor) -> list[Tensor]:
    """Returns `sum_j w_j d_j a_j^T` and `sum_j w_j d_j`, per example."""
    weighted = attention[:, None, :] * ops.swapaxes(trace.gradients, -1, -2)
    if trace.inputs.ndim == 3:
        products = ops.matmul(weighted, trace.inputs)
    else:
        outputs, entries = weighted.shape[1:]
        products = ops.matmul(ops.reshape(weighted, (-1, entries)), trace.inputs)
        products = ops.reshape(products, (-1, outputs, trace.inputs.shape[-1]))
    return [products, ops.sum(weighted, axis=-1)]


def _updated(
    stage: DenseStage, weights: _Weights, sums: list[Tensor], rates: list[Tensor]
) -> _Weights:
    """The stage's weights after one step, per example."""
    columns, gradient = weights[0], sums[0]
    if stage.is_cosine:
        # From the unit columns back to the columns themselves.
        inverse = inverse_norm(columns)
        units = columns * inverse
        squares = ops.sum(ops.square(columns), axis=-1, keepdims=True)
        inside = ops.cast(squares > NORM_EPSILON, columns.dtype)
        radial = inside * ops.sum(units * gradient, axis=-1, keepdims=True)
        gradient = (gradient - radial * units) * inverse
    updated = [columns - _per_input(rates[0]) * gradient]
    if len(weights) > 1:
        updated.append(weights[1] - rates[1] * sums[1])
    return updated


def _per_input(rate: Tensor) -> Tensor:
    """A kernel's rate: one number, or one per input, of shape `(inputs, 1)`."""
    return rate if rate.ndim == 0 else rate[:, 0]


def _adapted(stage: DenseStage, weights: _Weights, inputs: Tensor) -> Tensor:
    """The linear map of a stage, or its cosines, with weights of each example."""
    columns, *bias = weights
    if stage.is_cosine:
        (scale,) = _scales([stage])
        products = ops.sum(columns * unit_norm(inputs)[:, None, :], axis=-1)
        return scale * products * inverse_norm(columns)[..., 0]
    outputs = ops.matmul(columns, inputs[..., None])[..., 0]
    return outputs + bias[0] if bias else outputs


def _sums_of_trace(trace: _Trace, attention: Tensor, chunk_size: int) -> list[Tensor]:
    """`sum_j w_j d_j a_j^T`, in chunks of entries."""

    def terms(_: list[Tensor], chunk: list[Tensor]) -> list[Tensor]:
        attention, inputs, gradients = chunk
        return _weighted_sums(_Trace(inputs, gradients), attention)[:1]

    entries = [attention, trace.inputs, trace.gradients]
    return sum_over_chunks(terms, [], entries, (1, 0, 0), chunk_size)


def _attend(
    weights: _Weights,
    trace: _Trace,
    attention: Tensor,
    rates: list[Tensor],
    inputs: Tensor,
) -> Tensor:
    """A dense stage after one step from shared weights, on one input an example."""
    columns, *bias = weights
    scores = ops.matmul(_per_input(rates[0]) * inputs, ops.transpose(trace.inputs))
    outputs = ops.matmul(inputs, ops.transpose(columns))
    if bias:
        scores = scores + rates[1]
        outputs = outputs + bias[0]
    return outputs - ops.matmul(attention * scores, trace.gradients)
