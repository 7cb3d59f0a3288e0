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
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from nsl_keras.backend import Tensor, at_least_float32, gradients_of, sum_over_chunks
from nsl_keras.neighborhoods.cosine import (
    NORM_EPSILON,
    CosineDense,
    inverse_norm,
    unit_norm,
)
from nsl_keras.neighborhoods.inner_loop import (
    Entries,
    InnerLearningRate,
    InnerLoop,
    InnerLoss,
    cross_entropy,
)

#: A good number of entries for a chunk: with 128 examples and 10 classes its terms take
#: 2.5 MB, and stay in the processor's cache.
CACHED_ENTRIES = 512


@dataclasses.dataclass(frozen=True)
class DenseStage:
    """One layer of a head: `activation(x W + b)`, or `activation(scale * cos(x, W))`.

    Attributes:
        kernel: `W`, a variable or tensor of shape `(inputs, outputs)`.
        bias: `b`, of shape `(outputs,)`, or `None`; a stage of cosines has none.
        activation: What follows the linear map; `None` for nothing.
        scale: The factor in front of the cosines, which is not finetuned; `None` for a
            stage without cosines.
    """

    kernel: Any
    bias: Any = None
    activation: Callable[[Tensor], Tensor] | None = None
    scale: Any = None

    @property
    def is_cosine(self) -> bool:
        return self.scale is not None

    @property
    def variables(self) -> list[Any]:
        """What is finetuned: the kernel, and the bias if there is one."""
        return [self.kernel] if self.bias is None else [self.kernel, self.bias]

    def activate(self, outputs: Tensor) -> Tensor:
        return outputs if self.activation is None else self.activation(outputs)


class NoDualFormError(ValueError):
    """A head that the dual form cannot treat; the message names the layer."""


def stages_of(head: keras.layers.Layer) -> list[DenseStage]:
    """Returns the dense stages of a built head: a layer, or a `Sequential` of them.

    Args:
        head: `Dense`, `CosineDense`, or a `keras.Sequential` of these and of
            `Activation`, `ReLU`, `LeakyReLU` and `ELU` layers.

    Raises:
        NoDualFormError: If the head holds anything else; the message names the layer.
    """
    layers = head.layers if isinstance(head, keras.Sequential) else [head]
    stages: list[DenseStage] = []
    for layer in layers:
        if type(layer) is CosineDense:
            stages.append(DenseStage(layer.kernel, scale=layer.learned_scale))
        elif type(layer) is keras.layers.Dense:
            stages.append(DenseStage(layer.kernel, layer.bias, _activation_of(layer)))
        elif stages and type(layer) is keras.layers.Activation:
            stages[-1] = _followed_by(stages[-1], _activation_of(layer))
        elif stages and type(layer) in _ACTIVATION_LAYERS:
            stages[-1] = _followed_by(stages[-1], layer.call)
        else:
            raise NoDualFormError(
                f"layer {layer.name!r} is a {type(layer).__name__}, not a Dense or "
                "CosineDense layer (or an activation after one)"
            )
    if not stages:
        raise NoDualFormError(f"head {head.name!r} has no layers")
    return stages


#: Layers without weights, which compute in the dtype that they are given.
_ACTIVATION_LAYERS = (keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU)


def _activation_of(layer: keras.layers.Layer) -> Callable[..., Tensor]:
    """Returns the activation of a layer, which may be a layer itself, as a function."""
    activation = layer.activation
    if not isinstance(activation, keras.layers.Layer):
        return activation
    if type(activation) not in _ACTIVATION_LAYERS:
        raise NoDualFormError(
            f"layer {layer.name!r} has a {type(activation).__name__} as its activation"
        )
    return activation.call


def _followed_by(stage: DenseStage, activation: Callable[..., Tensor]) -> DenseStage:
    return dataclasses.replace(
        stage, activation=lambda outputs: activation(stage.activate(outputs))
    )


#: Weights of a stage in float32 or wider: its columns, of shape `(outputs, inputs)`, that
#: is, the transposed kernel; then its bias, if any, or the scale of its cosines. Columns
#: and bias have a batch axis in front once finetuned.
_Weights = list[Tensor]


@dataclasses.dataclass(frozen=True)
class _Trace:
    """What one stage saw on the dictionary: its inputs and its outputs' gradients.

    The inputs have shape `(entries, inputs)`, the gradients `(entries, outputs)`, each
    with a batch axis in front where they depend on weights of an example.
    """

    inputs: Tensor
    gradients: Tensor


class DualForm(InnerLoop):
    """The inner loop of dense heads, as attention over the dictionary.

    Args:
        stages: The head, from `stages_of`, or stages of one's own.
        learning_rate: `InnerLearningRate`.
        steps: int, the number of steps, at least 1.
        loss: Inner loss.
        chunk_size: int, the number of entries whose terms for all examples are held at
            once, in the forward pass and, made anew, in the backward pass; `None` for all.
    """

    def __init__(
        self,
        stages: Sequence[DenseStage],
        learning_rate: InnerLearningRate,
        steps: int = 1,
        loss: InnerLoss = cross_entropy,
        chunk_size: int | None = CACHED_ENTRIES,
    ) -> None:
        variables = [each for stage in stages for each in stage.variables]
        super().__init__(variables, learning_rate, steps, loss)
        self.stages = tuple(stages)
        self.chunk_size = chunk_size

    def count_multiply_adds(self, entries: int) -> int:
        """Returns the multiply-adds for one example, those of its attention aside.

        Args:
            entries: The number of entries of the dictionary.
        """
        kernels = [stage.kernel.shape for stage in self.stages]
        plain = [math.prod(shape) for shape in kernels]
        if self.steps == 1:
            sums = [
                size if stage.is_cosine else sum(shape)
                for stage, size, shape in zip(self.stages, plain, kernels, strict=True)
            ]
            return entries * sum(sums) + sum(plain)
        # Each step but the first passes over the entries with weights of the example's
        # own, forward and, down to the first layer's outputs, backward.
        passes = sum(plain) + sum(plain[1:])
        per_entry = self.steps * sum(plain) + (self.steps - 1) * passes
        return entries * per_entry + sum(plain)

    def outputs(self, entries: Entries, attention: Tensor, queries: Tensor) -> Tensor:
        if self.steps > 1:
            return self._call(self._finetune(entries, attention), queries)
        outputs = queries
        weights = self._start()
        traces = self._traces(weights, entries)
        for stage, own, trace, rates in zip(
            self.stages, weights, traces, self._rates(), strict=True
        ):
            if stage.is_cosine:
                sums = self._sums_of_trace(trace, attention)
                outputs = _linear(stage, _updated(stage, own, sums, rates), outputs)
            else:
                outputs = _attend(own, trace, attention, rates, outputs)
            outputs = stage.activate(outputs)
        return outputs

    def weights(self, entries: Entries, attention: Tensor) -> list[Tensor]:
        finetuned = []
        for stage, own in zip(self.stages, self._finetune(entries, attention), strict=True):
            finetuned.append(ops.swapaxes(own[0], -1, -2))
            finetuned += own[1 : len(stage.variables)]
        return finetuned

    def _start(self) -> list[_Weights]:
        """The weights from which all examples start."""
        return [
            [
                ops.transpose(at_least_float32(stage.kernel)),
                *(at_least_float32(v) for v in (stage.bias, stage.scale) if v is not None),
            ]
            for stage in self.stages
        ]

    def _rates(self) -> list[list[Tensor]]:
        """The learning rates of each stage's variables."""
        rates = iter(self.learning_rate.rates())
        return [[next(rates) for _ in stage.variables] for stage in self.stages]

    def _call(self, weights: list[_Weights], queries: Tensor) -> Tensor:
        """The head with weights of each example."""
        outputs = queries
        for stage, own in zip(self.stages, weights, strict=True):
            outputs = stage.activate(_linear(stage, own, outputs))
        return outputs

    def _finetune(self, entries: Entries, attention: Tensor) -> list[_Weights]:
        """The weights of each example, after all steps."""
        weights = self._start()
        for _ in range(self.steps):
            sums = iter(self._sums(weights, entries, attention))
            weights = [
                _updated(stage, own, [next(sums) for _ in stage.variables], rates)
                for stage, own, rates in zip(
                    self.stages, weights, self._rates(), strict=True
                )
            ]
        return weights

    def _sums(
        self, weights: list[_Weights], entries: Entries, attention: Tensor
    ) -> list[Tensor]:
        """The inner loss's gradients for each example, made in chunks of entries."""

        def terms(shared: list[Tensor], chunk: list[Tensor]) -> list[Tensor]:
            keys, values, attention = chunk
            weights_here = keras.tree.pack_sequence_as(weights, shared)
            traces = self._traces(weights_here, Entries(keys, values))
            return [
                total
                for stage, trace in zip(self.stages, traces, strict=True)
                for total in _weighted_sums(trace, attention)[: len(stage.variables)]
            ]

        return sum_over_chunks(
            terms,
            keras.tree.flatten(weights),
            [*entries, attention],
            axes=(0, 0, 1),
            chunk_size=self.chunk_size,
        )

    def _traces(self, weights: list[_Weights], entries: Entries) -> list[_Trace]:
        """One forward and one backward pass of the head over the dictionary.

        Entries do not touch each other, so the gradient of the summed losses with respect
        to offsets of a stage's outputs is each entry's own.
        """

        def total_loss(offsets: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            seen = []
            outputs = entries.keys
            for stage, (columns, *rest), offset in zip(
                self.stages, weights, offsets, strict=True
            ):
                if stage.is_cosine:
                    outputs = rest[0] * unit_norm(outputs)
                    columns = unit_norm(columns)
                seen.append(outputs)
                outputs = ops.matmul(outputs, ops.swapaxes(columns, -1, -2)) + offset
                if stage.bias is not None:
                    outputs = outputs + rest[0][..., None, :]
                outputs = stage.activate(outputs)
            return ops.sum(self.loss(entries.values, outputs)), seen

        batch = ops.shape(weights[0][0])[:-2]
        count = ops.shape(entries.keys)[0]
        zeros = [
            ops.zeros((*batch, count, own[0].shape[-2]), entries.keys.dtype)
            for own in weights
        ]
        gradients, inputs = gradients_of(total_loss, zeros)
        return [_Trace(*pair) for pair in zip(inputs, gradients, strict=True)]

    def _sums_of_trace(self, trace: _Trace, attention: Tensor) -> list[Tensor]:
        """`sum_j w_j d_j a_j^T`, in chunks of entries."""

        def terms(_: list[Tensor], chunk: list[Tensor]) -> list[Tensor]:
            attention, inputs, gradients = chunk
            return _weighted_sums(_Trace(inputs, gradients), attention)[:1]

        entries = [attention, trace.inputs, trace.gradients]
        return sum_over_chunks(terms, [], entries, (1, 0, 0), self.chunk_size)


def _weighted_sums(trace: _Trace, attention: Tensor) -> list[Tensor]:
    """Returns `sum_j w_j d_j a_j^T` and `sum_j w_j d_j`, per example."""
    weighted = attention[:, None, :] * ops.swapaxes(trace.gradients, -1, -2)
    if trace.inputs.ndim == 3:
        products = ops.matmul(weighted, trace.inputs)
    else:
        entries = ops.shape(weighted)[2]
        products = ops.matmul(ops.reshape(weighted, (-1, entries)), trace.inputs)
        shape = (-1, weighted.shape[1], trace.inputs.shape[-1])
        products = ops.reshape(products, shape)
    return [products, ops.sum(weighted, axis=-1)]


def _updated(
    stage: DenseStage, weights: _Weights, sums: list[Tensor], rates: list[Tensor]
) -> _Weights:
    """The stage's weights after one step, per example."""
    (columns, *rest), gradient = weights, sums[0]
    if stage.is_cosine:
        # From the unit columns back to the columns themselves.
        inverse = inverse_norm(columns)
        units = columns * inverse
        squares = ops.sum(ops.square(columns), axis=-1, keepdims=True)
        inside = ops.cast(squares > NORM_EPSILON, columns.dtype)
        radial = inside * ops.sum(units * gradient, axis=-1, keepdims=True)
        gradient = (gradient - radial * units) * inverse
    columns = columns - _per_input(rates[0]) * gradient  # MN Eq. (3)
    if stage.bias is not None:
        rest = [rest[0] - rates[1] * sums[1]]
    return [columns, *rest]


def _per_input(rate: Tensor) -> Tensor:
    """A kernel's rate: one number, or one per input, of shape `(inputs, 1)`."""
    return rate if rate.ndim == 0 else rate[:, 0]


def _linear(stage: DenseStage, weights: _Weights, inputs: Tensor) -> Tensor:
    """The linear map of a stage, or its cosines, with weights of each example."""
    columns, *rest = weights
    if stage.is_cosine:
        products = ops.sum(columns * unit_norm(inputs)[:, None, :], axis=-1)
        return rest[0] * products * inverse_norm(columns)[..., 0]
    outputs = ops.matmul(columns, inputs[..., None])[..., 0]
    return outputs + rest[0] if rest else outputs


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
    return outputs - ops.matmul(attention * scores, trace.gradients)  # MN Eq. (3)
