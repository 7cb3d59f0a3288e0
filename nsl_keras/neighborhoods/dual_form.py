"""Per-example finetuning of dense heads as attention over the dictionary: exact.

One forward and one backward pass over the dictionary, shared by all examples, compute each
dense layer's inputs `A` (rows `a_j`) and the loss's gradients `G` (rows `g_j`) with respect
to its outputs. One inner step for an example with attention `w` is then

    (W - rate * sum_j w_j a_j g_j^T)^T h  =  W^T h - G^T [w * (A (rate * h))]

so a finetuned layer costs O(S * (inputs + outputs)) per example, without per-example
weights. Several steps use per-example weights, as do cosine layers, which need the norms of
their finetuned columns: one large product, in chunks of entries that fit the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops, tree

from nsl_keras.backend import Tensor, gradients_of, sum_over_chunks
from nsl_keras.neighborhoods.cosine import CosineDense
from nsl_keras.neighborhoods.inner_loop import (
    Entries,
    InnerLearningRate,
    InnerLoop,
    InnerLoss,
    average_over_path,
    cross_entropy,
)
from nsl_keras.neighborhoods.key_metrics import NORM_EPSILON, inverse_norm

#: Entries in a chunk by default: with 128 examples and 10 classes the terms take 2.5 MB.
CACHED_ENTRIES = 512


@dataclasses.dataclass(frozen=True)
class DenseStage:
    """One layer of a head: `activation(x W + b)`, or `activation(scale * cos(x, W))`.

    `weights()` returns the kernel `W`, of shape `(inputs, outputs)`, and then the bias, if
    any, or the scale of the cosines, which is not finetuned.
    """

    weights: Callable[[], list[Any]]
    activation: Callable[..., Tensor] = keras.activations.linear
    is_cosine: bool = False

    def finetuned(self, weights: list[Any]) -> list[Any]:
        """Returns those of the stage's weights that are finetuned."""
        return weights[:1] if self.is_cosine else weights


class NoDualFormError(ValueError):
    """The head has no dual form; the message names the layer."""


#: Layers without weights, which compute in the dtype of their inputs.
_ACTIVATION_LAYERS = (keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU)


def stages_of(head: keras.layers.Layer) -> list[DenseStage]:
    """Returns the dense stages of a head, by the types of its layers, built or not.

    The head is a `Dense` or `CosineDense` layer, or a `keras.Sequential` of these and of
    `Activation`, `ReLU`, `LeakyReLU` and `ELU` layers; otherwise `NoDualFormError`.
    """
    stages: list[DenseStage] = []
    for layer in layers_of(head):
        if type(layer) is CosineDense:
            names = ["kernel", "learned_scale"]
            stages.append(DenseStage(_reader(layer, names), is_cosine=True))
        elif type(layer) is keras.layers.Dense:
            names = ["kernel", "bias"] if layer.use_bias else ["kernel"]
            stages.append(DenseStage(_reader(layer, names), _activation_of(layer)))
        elif stages and type(layer) in (keras.layers.Activation, *_ACTIVATION_LAYERS):
            stages[-1] = _followed_by(stages[-1], _activation_of(layer))
        else:
            raise NoDualFormError(
                f"layer {layer.name!r} is a {type(layer).__name__}, not a Dense or "
                "CosineDense layer (or an activation after one)"
            )
    return stages


def _reader(layer: keras.layers.Layer, names: list[str]) -> Callable[[], list[Any]]:
    return lambda: [getattr(layer, name) for name in names]


def layers_of(head: Any) -> list[keras.layers.Layer]:
    """Returns the layers of a stack, or the head as the only one."""
    return head.layers if isinstance(head, keras.Sequential) else [head]


def _activation_of(layer: keras.layers.Layer) -> Callable[..., Tensor]:
    """Returns a layer's activation, which may be a layer itself, as a function."""
    activation = layer if type(layer) in _ACTIVATION_LAYERS else layer.activation
    if not isinstance(activation, keras.layers.Layer):
        return activation
    if type(activation) not in _ACTIVATION_LAYERS:
        raise NoDualFormError(
            f"layer {layer.name!r} has a {type(activation).__name__} as its activation"
        )
    return activation.call


def _followed_by(stage: DenseStage, activation: Callable[..., Tensor]) -> DenseStage:
    first = stage.activation
    return dataclasses.replace(stage, activation=lambda outputs: activation(first(outputs)))


#: The weights of a stage. Once finetuned, kernel and bias have a batch axis in front.
_Weights = list[Tensor]


class _Trace(NamedTuple):
    """One stage's inputs on the dictionary, and the gradients that step the kernel.

    An entry adds the product of its inputs and its gradients to the gradient of the kernel
    (of a cosine layer, of the kernel's unit columns). Shapes are `(entries, inputs)` and
    `(entries, outputs)`, with a batch axis in front where they depend on per-example
    weights.
    """

    inputs: Tensor
    gradients: Tensor


class DualForm(InnerLoop):
    """The inner loop of dense heads, as attention over the dictionary.

    `chunk_size` bounds the number of entries whose terms for all examples are held at once;
    the backward pass computes the terms again. `None` takes all entries.
    """

    def __init__(
        self,
        stages: Sequence[DenseStage],
        learning_rate: InnerLearningRate,
        steps: int = 1,
        loss: InnerLoss = cross_entropy,
        chunk_size: int | None = CACHED_ENTRIES,
    ) -> None:
        super().__init__(learning_rate, steps, loss)
        self.stages = tuple(stages)
        self.chunk_size = chunk_size

    @property
    def variables(self) -> list[Any]:
        pairs = zip(self.stages, self._weights(), strict=True)
        return [each for stage, own in pairs for each in stage.finetuned(own)]

    def _weights(self) -> list[_Weights]:
        return [stage.weights() for stage in self.stages]

    def constants(self, entries: Entries) -> list[Tensor]:
        """Returns the traces of one step, but for the first inputs, which are the keys."""
        if self.steps > 1:
            return []
        return tree.flatten(self._traces(self._weights(), entries))[1:]

    def constant_symbols(self, entries: int, dtype: str) -> list[keras.KerasTensor]:
        sizes = [size for kernel, *_ in self._weights() for size in kernel.shape]
        symbols = [keras.KerasTensor((entries, size), dtype) for size in sizes[1:]]
        return symbols if self.steps == 1 else []

    def outputs(self, entries: Entries, attention: Tensor, queries: Tensor) -> Tensor:
        if self.steps > 1:
            outputs = queries[:, None]
            finetuned = self._finetune(entries, attention)
            for stage, weights in zip(self.stages, finetuned, strict=True):
                outputs = stage.activation(_linear(stage, weights, outputs))
            return outputs[:, 0]
        outputs, rates = queries, iter(self.learning_rate.rates())
        tensors = iter([entries.keys, *(entries.constants or self.constants(entries))])
        for stage, weights in zip(self.stages, self._weights(), strict=True):
            trace = _Trace(next(tensors), next(tensors))
            if not stage.is_cosine:
                # The dual form of MN Eq. (3), one step.
                rate, transposed = next(rates), ops.swapaxes(trace.inputs, -1, -2)
                of_bias = next(rates) if len(weights) > 1 else 0
                if self.learning_rate.form == "diagonal":
                    scaled = outputs * ops.reshape(rate, (-1,))
                    scores = ops.matmul(scaled, transposed) + of_bias
                    changes = ops.matmul(attention * scores, trace.gradients)
                else:  # One rate for both; attention by cosines has the same product.
                    scores = ops.matmul(outputs, transposed) + (len(weights) - 1)
                    changes = rate * ops.matmul(attention * scores, trace.gradients)
                outputs = _linear(stage, weights, outputs) - changes
            else:
                sums = sum_over_chunks(
                    lambda _, chunk: _weighted_sums(*chunk),
                    [],
                    [*trace, attention],
                    axes=(0, 0, 1),
                    chunk_size=self.chunk_size,
                )
                finetuned = _updated(stage, weights, sums, rates)
                outputs = _linear(stage, finetuned, outputs[:, None])[:, 0]
            outputs = stage.activation(outputs)
        return outputs

    def weights(self, entries: Entries, attention: Tensor) -> list[Tensor]:
        finetuned = self._finetune(entries, attention)
        return [
            tensor
            for stage, own in zip(self.stages, finetuned, strict=True)
            for tensor in stage.finetuned(own)
        ]

    def effects(self, entries: Entries, attention: Tensor, queries: Tensor) -> Tensor:
        stage, *others = self.stages
        if self.steps > 1 or others or stage.activation is not keras.activations.linear:
            return super().effects(entries, attention, queries)
        (weights,) = self._weights()
        (gradients,) = entries.constants or self.constants(entries)
        sums = _weighted_sums(entries.keys, gradients, attention)

        def total(sums: list[Tensor]) -> tuple[Tensor, None]:
            rates = iter(self.learning_rate.rates())
            finetuned = _updated(stage, weights, sums, rates)
            return ops.sum(_linear(stage, finetuned, queries[:, None])), None

        # An output depends on the sums of its own column alone, so that the derivatives of
        # the total are those of each output.
        columns, biases = average_over_path(
            lambda time: gradients_of(total, [time * each for each in sums])[0],
            [ops.zeros_like(each) for each in sums],
        )
        slopes = ops.matmul(columns, ops.transpose(entries.keys)) + biases[..., None]
        return attention[..., None] * gradients * ops.swapaxes(slopes, 1, 2)

    def _finetune(self, entries: Entries, attention: Tensor) -> list[_Weights]:
        """Returns the weights of each example after all steps."""
        weights = self._weights()

        def terms(shared: list[Tensor], chunk: list[Tensor]) -> list[Tensor]:
            keys, values, attention = chunk
            traces = self._traces(
                tree.pack_sequence_as(weights, shared), Entries(keys, values)
            )
            return [
                total for trace in traces for total in _weighted_sums(*trace, attention)
            ]

        for _ in range(self.steps):
            sums = sum_over_chunks(
                terms,
                tree.flatten(weights),
                [entries.keys, entries.values, attention],
                axes=(0, 0, 1),
                chunk_size=self.chunk_size,
            )
            pairs = zip(sums[::2], sums[1::2], strict=True)
            rates = iter(self.learning_rate.rates())
            weights = [
                _updated(stage, own, pair, rates)
                for stage, own, pair in zip(self.stages, weights, pairs, strict=True)
            ]
        return weights

    def _traces(self, weights: list[_Weights], entries: Entries) -> list[_Trace]:
        """Runs one forward and one backward pass of the head over the dictionary.

        Entries do not interact: the gradient of the summed losses is each entry's own.
        """

        def total_loss(offsets: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            seen, outputs = [], entries.keys
            for stage, own, offset in zip(self.stages, weights, offsets, strict=True):
                seen.append(outputs)
                outputs = stage.activation(_linear(stage, own, outputs) + offset)
            return ops.sum(self.loss(entries.values, outputs)), seen

        batch = ops.shape(weights[0][0])[:-2]
        count = ops.shape(entries.keys)[0]
        zeros = [
            ops.zeros((*batch, count, kernel.shape[-1]), entries.keys.dtype)
            for kernel, *_ in weights
        ]
        gradients, inputs = gradients_of(total_loss, zeros)
        traces = [_Trace(*pair) for pair in zip(inputs, gradients, strict=True)]
        return [
            _Trace(trace.inputs, trace.gradients * _scale_of(own, trace.inputs))
            if stage.is_cosine
            else trace
            for stage, own, trace in zip(self.stages, weights, traces, strict=True)
        ]


def _linear(stage: DenseStage, weights: _Weights, inputs: Tensor) -> Tensor:
    """Returns the outputs before activation."""
    kernel, *rest = (ops.cast(each, inputs.dtype) for each in weights)
    if stage.is_cosine:
        inputs = inputs * _scale_of(weights, inputs)
        return ops.matmul(inputs, kernel) * inverse_norm(kernel, axis=-2)
    outputs = ops.matmul(inputs, kernel)
    return outputs + rest[0][..., None, :] if rest else outputs


def _scale_of(weights: _Weights, inputs: Tensor) -> Tensor:
    """Returns what a cosine layer multiplies its inputs by."""
    return ops.cast(weights[1], inputs.dtype) * inverse_norm(inputs)


def _weighted_sums(inputs: Tensor, gradients: Tensor, attention: Tensor) -> list[Tensor]:
    """Returns `sum_j w_j g_j a_j^T` and `sum_j w_j g_j`, per example."""
    weighted = attention[:, None, :] * ops.swapaxes(gradients, -1, -2)
    if inputs.ndim == 3:
        products = ops.matmul(weighted, inputs)
    else:
        entries = ops.shape(weighted)[2]
        products = ops.matmul(ops.reshape(weighted, (-1, entries)), inputs)
        products = ops.reshape(products, (-1, weighted.shape[1], inputs.shape[-1]))
    return [products, ops.sum(weighted, axis=-1)]


def _updated(
    stage: DenseStage, weights: _Weights, sums: Sequence[Tensor], rates: Iterator[Tensor]
) -> _Weights:
    """Returns the stage's weights after one step by `_weighted_sums`, per example.

    It takes the next learning rates, those of the stage's variables.
    """
    (kernel, *rest), (transposed, of_bias) = weights, sums
    gradient = ops.swapaxes(transposed, -1, -2)
    kernel = ops.cast(kernel, gradient.dtype)
    if stage.is_cosine:
        # From the unit columns back to the columns themselves.
        squares = ops.sum(ops.square(kernel), axis=-2, keepdims=True)
        inverse = inverse_norm(kernel, axis=-2)
        units, inside = kernel * inverse, ops.cast(squares > NORM_EPSILON, kernel.dtype)
        radial = inside * ops.sum(units * gradient, axis=-2, keepdims=True)
        gradient = (gradient - radial * units) * inverse
    # MN Eq. (3), for cosine layers and several steps.
    kernel = kernel - next(rates) * gradient
    if rest and not stage.is_cosine:
        rest = [ops.cast(rest[0], kernel.dtype) - next(rates) * of_bias]
    return [kernel, *rest]
