"""Per-example finetuning of dense heads as attention over the dictionary: exact.

One forward and one backward pass over the dictionary, shared by all examples, compute each
dense layer's inputs `A` (rows `a_j`) and the loss's gradients `G` (rows `g_j`) with respect
to its outputs. One inner step for an example with attention `w` is then

    (W - rate * sum_j w_j a_j g_j^T)^T h  =  W^T h - G^T [w * (A (rate * h))]

so a finetuned layer costs O(S * (inputs + outputs)) per example, without weights of its
own. Several steps use per-example weights, as do cosine layers, which need the norms of
their finetuned columns: one large product, in chunks of entries that fit the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import layers, ops, tree

from nsl_keras.backend import Tensor, gradients_of, sum_over_chunks
from nsl_keras.neighborhoods.cosine import CosineDense
from nsl_keras.neighborhoods.inner_loop import Entries, InnerLoop, average_over_path
from nsl_keras.neighborhoods.key_metrics import NORM_EPSILON, inverse_norm

#: The axes over the entries: of two tensors with one row each, and of the attention.
_AXES = (0, 0, 1)

#: Default chunk: with 128 examples and 10 classes the terms of its entries take 2.5 MB.
CACHED_ENTRIES = 512


@dataclasses.dataclass(frozen=True)
class DenseStage:
    """One layer of a head: `activation(x W + b)`, or `activation(scale * cos(x, W))`.

    `weights` are the kernel `W`, of shape `(inputs, outputs)`, and the bias, if any, or the
    scale of the cosines, which is not finetuned. Once finetuned, they have a batch axis in
    front.
    """

    weights: list[Any]
    activation: Callable[..., Tensor] = keras.activations.linear
    is_cosine: bool = False


#: Layers without weights. Their `call` computes in the dtype of its inputs.
_ACTIVATIONS = (layers.Activation, layers.ReLU, layers.LeakyReLU, layers.ELU)


def stages_of(head: Any) -> list[DenseStage]:
    """Returns the dense stages of a head, with its present weights if it is built.

    The head is a `Dense` or `CosineDense` layer, or a `keras.Sequential` of these and of
    `_ACTIVATIONS`; otherwise a `ValueError` names the layer.
    """
    stages: list[DenseStage] = []
    for layer in head.layers if type(head) is keras.Sequential else [head]:
        activation: Any = getattr(layer, "activation", None) or keras.activations.linear
        kind, is_cosine = type(layer), type(layer) is CosineDense
        names = ("kernel", "learned_scale" if is_cosine else "bias")
        given = [getattr(layer, name, None) for name in names]
        weights = [each for each in given if each is not None]
        # False with LoRA, with int8, and with activations that have weights, such as PReLU.
        is_plain = not isinstance(activation, layers.Layer) and all(
            isinstance(each, keras.Variable) and keras.backend.is_float_dtype(each.dtype)
            for each in weights
        )
        if is_plain and kind in (layers.Dense, CosineDense):
            stages.append(DenseStage(weights, activation, is_cosine))
        elif is_plain and stages and kind in _ACTIVATIONS:
            stages[-1] = _followed_by(stages[-1], layer.call)
        else:
            raise ValueError(
                "`head` must consist of Dense and CosineDense layers, with plain kernels, "
                "without LoRA or quantization, and activations for "
                f'`inner_loop="dual"`. Received: {layer} with activation={activation}'
            )
    return stages


def _followed_by(stage: DenseStage, activation: Callable[..., Tensor]) -> DenseStage:
    first = stage.activation
    return dataclasses.replace(stage, activation=lambda outputs: activation(first(outputs)))


#: A stage's inputs `(entries, inputs)` and gradients `(entries, outputs)`; a batch axis is
#: in front if they depend on per-example weights. Their product is an entry's gradient
#: of the kernel (of a cosine layer, of the kernel's unit columns).
_Trace = tuple[Tensor, Tensor]


@dataclasses.dataclass(kw_only=True)
class DualForm(InnerLoop):
    """The inner loop of dense heads, as attention over the dictionary.

    `stages()` returns the head's stages with its present weights. `chunk_size` bounds the
    entries whose terms are in memory at once; `None` takes all.
    """

    stages: Callable[[], list[DenseStage]]
    chunk_size: int | None = CACHED_ENTRIES

    def compute_constants(self, entries: Entries) -> list[Tensor]:
        """Returns the traces of one step, but for the first inputs, which are the keys."""
        if self.steps > 1:
            return []
        return tree.flatten(self._traces(self.stages(), entries))[1:]

    def outputs(self, entries: Entries, attention: Tensor, queries: Tensor) -> Tensor:
        stages = self.stages()
        if self.steps > 1:
            outputs = queries[:, None]
            for stage in self._finetuned(stages, entries, attention):
                outputs = stage.activation(_linear(stage, outputs))
            return outputs[:, 0]
        outputs, rates = queries, iter(self.learning_rate.rates())
        # Inputs and gradients of each stage; the first inputs are the keys.
        traces = entries.constants or tree.flatten(self._traces(stages, entries))[1:]
        tensors = iter([entries.keys, *traces])
        for stage in stages:
            inputs, gradients = next(tensors), next(tensors)
            if stage.is_cosine:
                parts = [inputs, gradients, attention]
                sums = sum_over_chunks(_weighted_sums, [], parts, _AXES, self.chunk_size)
                outputs = _linear(_updated(stage, sums, rates), outputs[:, None])[:, 0]
            else:
                # The dual form of MN Eq. (3), one step.
                rate, transposed = next(rates), ops.swapaxes(inputs, -1, -2)
                has_bias = len(stage.weights) > 1
                of_bias = next(rates) if has_bias else 0
                if self.learning_rate.form == "diagonal":
                    scaled = outputs * ops.reshape(rate, (-1,))
                    scores = ops.matmul(scaled, transposed) + of_bias
                    changes = ops.matmul(attention * scores, gradients)
                else:  # One rate for both; attention by cosines has the same product.
                    scores = ops.matmul(outputs, transposed) + int(has_bias)
                    changes = rate * ops.matmul(attention * scores, gradients)
                outputs = _linear(stage, outputs) - changes
            outputs = stage.activation(outputs)
        return outputs

    def weights(self, entries: Entries, attention: Tensor) -> list[Tensor]:
        finetuned = self._finetuned(self.stages(), entries, attention)
        return tree.flatten(
            [stage.weights[:1] if stage.is_cosine else stage.weights for stage in finetuned]
        )

    def effects(self, entries: Entries, attention: Tensor, queries: Tensor) -> Tensor:
        stage, *others = self.stages()
        if self.steps > 1 or others or stage.activation is not keras.activations.linear:
            return super().effects(entries, attention, queries)
        gradients = (entries.constants or self.compute_constants(entries))[0]
        sums = _weighted_sums([], [entries.keys, gradients, attention])

        def total(sums: list[Tensor]) -> tuple[Tensor, None]:
            finetuned = _updated(stage, sums, iter(self.learning_rate.rates()))
            return ops.sum(_linear(finetuned, queries[:, None])), None

        # An output depends on the sums of its own column alone, so that the derivatives of
        # the total are those of each output.
        columns, biases = average_over_path(
            lambda time: gradients_of(total, [time * each for each in sums])[0],
            [ops.zeros_like(each) for each in sums],
        )
        slopes = ops.matmul(columns, ops.transpose(entries.keys)) + biases[..., None]
        return attention[..., None] * gradients * ops.swapaxes(slopes, 1, 2)

    def _finetuned(
        self, stages: list[DenseStage], entries: Entries, attention: Tensor
    ) -> list[DenseStage]:
        """Returns the stages with each example's weights."""
        structure = [stage.weights for stage in stages]

        def terms(shared: list[Tensor], chunk: list[Tensor]) -> list[Tensor]:
            keys, values, attention = chunk
            weights = tree.pack_sequence_as(structure, shared)
            pairs = zip(stages, weights, strict=True)
            own = [dataclasses.replace(stage, weights=each) for stage, each in pairs]
            traces = self._traces(own, Entries(keys, values))
            sums = [_weighted_sums([], [*trace, attention]) for trace in traces]
            return tree.flatten(sums)

        tensors = [entries.keys, entries.values, attention]
        for _ in range(self.steps):
            shared = tree.flatten([stage.weights for stage in stages])
            sums = iter(sum_over_chunks(terms, shared, tensors, _AXES, self.chunk_size))
            rates = iter(self.learning_rate.rates())
            stages = [_updated(each, [next(sums), next(sums)], rates) for each in stages]
        return stages

    def _traces(self, stages: list[DenseStage], entries: Entries) -> list[_Trace]:
        """Runs one forward and one backward pass of the head over the dictionary.

        Entries do not interact: the gradient of the summed losses is each entry's own.
        """

        def total_loss(offsets: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            seen, outputs = [], entries.keys
            for stage, offset in zip(stages, offsets, strict=True):
                seen.append(outputs)
                outputs = stage.activation(_linear(stage, outputs) + offset)
            return ops.sum(self.loss(entries.values, outputs)), seen

        kernels = [stage.weights[0] for stage in stages]
        count = ops.shape(entries.keys)[0]
        zeros = [
            ops.zeros((*ops.shape(each)[:-2], count, each.shape[-1]), entries.keys.dtype)
            for each in kernels
        ]
        gradients, inputs = gradients_of(total_loss, zeros)
        for index, stage in enumerate(stages):
            if stage.is_cosine:
                gradients[index] *= _scale_of(stage, inputs[index])
        return [*zip(inputs, gradients, strict=True)]


def _linear(stage: DenseStage, inputs: Tensor) -> Tensor:
    kernel, *rest = (ops.cast(each, inputs.dtype) for each in stage.weights)
    if stage.is_cosine:
        inputs = inputs * _scale_of(stage, inputs)
        return ops.matmul(inputs, kernel) * inverse_norm(kernel, axis=-2)
    outputs = ops.matmul(inputs, kernel)
    return outputs + rest[0][..., None, :] if rest else outputs


def _scale_of(stage: DenseStage, inputs: Tensor) -> Tensor:
    """Returns what a cosine layer multiplies its inputs by."""
    return ops.cast(stage.weights[1], inputs.dtype) * inverse_norm(inputs)


def _weighted_sums(_: list[Tensor], chunk: list[Tensor]) -> list[Tensor]:
    """Returns `sum_j w_j g_j a_j^T` and `sum_j w_j g_j` for a trace and the attention."""
    inputs, gradients, attention = chunk
    weighted = attention[:, None, :] * ops.swapaxes(gradients, -1, -2)
    if inputs.ndim == 3:
        products = ops.matmul(weighted, inputs)
    else:
        entries = ops.shape(weighted)[2]
        products = ops.matmul(ops.reshape(weighted, (-1, entries)), inputs)
        products = ops.reshape(products, (-1, weighted.shape[1], inputs.shape[-1]))
    return [products, ops.sum(weighted, axis=-1)]


def _updated(
    stage: DenseStage, sums: Sequence[Tensor], rates: Iterator[Tensor]
) -> DenseStage:
    """Returns a stage after a step by `_weighted_sums` at the next rates."""
    (kernel, *rest), (transposed, of_bias) = stage.weights, sums
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
    return dataclasses.replace(stage, weights=[kernel, *rest])
