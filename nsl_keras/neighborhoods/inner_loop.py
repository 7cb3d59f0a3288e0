"""Inner loops, their losses and learning rates, and the loop for any head.

An inner loop finetunes a head for each example on a dictionary's entries, weighted by the
example's attention. `NestedTape` takes any head; `DualForm` gives the same results for
dense heads at a fraction of the cost.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from nsl_keras import backend, nesting, validation
from nsl_keras.backend import Tensor, gradients_of, gradients_of_columns

#: An inner loss `loss(values, outputs)`, per entry.
InnerLoss = Callable[[Tensor, Tensor], Tensor]


class Entries(NamedTuple):
    """Keys `(entries, features)`, and values `(entries, outputs)`.

    In inference `constants` may stand in for the values, which are `None` then.
    """

    keys: Tensor
    values: Tensor | None
    constants: Sequence[Tensor] = ()


# The losses are written out: with a fused softmax cross-entropy, the second derivative with
# respect to the labels is zero, and the dictionary's values would never train.


def cross_entropy(values: Tensor, logits: Tensor) -> Tensor:
    """Returns `logsumexp(f) * sum(v) - sum(v * f)` over the last axis."""
    total = ops.logsumexp(logits, axis=-1) * ops.sum(values, axis=-1)
    return total - ops.sum(values * logits, axis=-1)


def squared_error(values: Tensor, outputs: Tensor) -> Tensor:
    """Returns `sum((f - v)^2)` over the last axis."""
    return ops.sum(ops.square(outputs - values), axis=-1)


LOSSES = {"classification": cross_entropy, "regression": squared_error}


def finetuned_variables(head: keras.layers.Layer) -> list[Any]:
    """Returns a head's variables except those trained only, which have `adapts = False`."""
    return [each for each in head.variables if getattr(each, "adapts", True)]


def require_plain_layers(head: keras.layers.Layer) -> None:
    """Raises unless the weights of a head are all that its outputs and losses depend on."""
    demand = (
        "of layers with plain kernels, without LoRA or quantization, and without activity "
        "regularizers, since it is finetuned for each example; the backbone may have them"
    )
    for layer in nesting.parts_of(head):
        is_plain = getattr(layer, "activity_regularizer", None) is None
        is_plain = is_plain and nesting.has_plain_kernel(layer)
        validation.require(is_plain, "head", demand, layer)


@keras.saving.register_keras_serializable("nsl_keras")
class InnerLearningRate(keras.layers.Layer):
    """Learning rates for a list of weights; each broadcasts against its weight.

    `form` and `initial` are `MetaNeighborhoodHead`'s `learning_rate_form` and
    `inner_learning_rate`.
    """

    def __init__(self, initial: float, form: str = "scalar", **kwargs: Any) -> None:
        super().__init__(**{"name": "inner_learning_rate", **kwargs})
        self.initial = validation.positive_number(initial, "inner_learning_rate")
        forms = ("scalar", "diagonal", "fixed")
        self.form = validation.one_of(form, forms, "learning_rate_form")

    def build_for(self, shapes: Sequence[tuple[int, ...]]) -> None:
        by_row = [(*shape[:1], *[1] * len(shape[1:])) for shape in shapes]
        by_row = [shape if len(shape) > 1 else () for shape in by_row]
        of_form: dict[str, Any] = {"scalar": [()], "diagonal": by_row, "fixed": []}
        start = keras.initializers.Constant(self.initial)
        options = {"dtype": backend.wide_dtype(self.variable_dtype), "autocast": False}
        for index, shape in enumerate(of_form[self.form]):
            name = f"inner_learning_rate_{index}"
            raw = self.add_weight(shape, start, name=name, **options)
            # An attribute each: `tf.train.Checkpoint` misses the variables in a list.
            setattr(self, f"raw_rate_{index}", raw)
        self.num_weights = len(shapes)
        self.built = True

    def rates(self) -> list[Tensor]:
        """Returns the learning rates, in the order of the shapes given to `build_for`."""
        rates = [ops.abs(ops.convert_to_tensor(raw)) for raw in self.weights]
        rates = rates or [self.initial]
        return rates if self.form == "diagonal" else rates * self.num_weights


@dataclasses.dataclass
class InnerLoop(abc.ABC):
    """Per-example finetuning of a head, by Eq. (3) of Meta-Neighborhoods.

        phi_z = phi - rate * d/dphi sum_j w_j(z) L(f_phi(k_j), v_j)        (steps times)

    The learning rates were built for the shapes of the `finetuned_variables`.
    """

    learning_rate: InnerLearningRate
    steps: int = 1
    loss: InnerLoss = cross_entropy

    def compute_constants(self, entries: Entries) -> list[Tensor]:
        """Returns what `outputs` needs of the entries and the head, but of no query."""
        return []

    @abc.abstractmethod
    def outputs(self, entries: Entries, attention: Tensor, queries: Tensor) -> Tensor:
        """Returns each query's outputs `(batch, outputs)` of the head finetuned for it.

        The attention has shape `(batch, entries)`, the queries `(batch, features)`.
        """

    @abc.abstractmethod
    def weights(self, entries: Entries, attention: Tensor) -> list[Tensor]:
        """Returns each example's finetuned weights, tensors `(batch, *variable_shape)`."""

    def effects(self, entries: Entries, attention: Tensor, queries: Tensor) -> Tensor:
        """Returns each entry's share in the change of each output.

        For a fixed query, the outputs are a function `F(a)` of the entries' weights `a` in
        the inner loss. From the outputs before adaptation, `F(0)`, to the attention `w`,

            F(w) - F(0) = sum_j w_j * integral_0^1 dF/da_j (t w) dt

        and entry `j`'s share is its term (its Aumann-Shapley value, or "integrated
        gradients"). For one inner step on a dense layer it is the effect of the entry
        alone, `-rate * w_j (k_j . z + 1) dL_j/df`. Shares have shape
        `(batch, entries, outputs)`.
        """

        def slopes(time: Tensor) -> list[Tensor]:
            return gradients_of_columns(
                lambda weights: self.outputs(entries, weights, queries), time * attention
            )

        outputs = self.outputs(entries, attention, queries)
        start = [ops.zeros_like(attention)] * outputs.shape[-1]
        shares = [attention * slope for slope in average_over_path(slopes, start)]
        return ops.stack(shares, axis=-1)


#: Gauss-Legendre nodes of the integral: exact for polynomials in `t` up to degree 63.
PATH_POINTS = 32


def average_over_path(
    slopes: Callable[[Tensor], list[Tensor]], start: list[Tensor]
) -> list[Tensor]:
    """Returns the integrals of `slopes(t)` over `t` from 0 to 1, added to zeros `start`."""
    nodes, weights = np.polynomial.legendre.leggauss(PATH_POINTS)
    times = ops.convert_to_tensor((nodes + 1) / 2, start[0].dtype)
    weights = ops.convert_to_tensor(weights / 2, start[0].dtype)

    def add(point: Tensor, totals: list[Tensor]) -> list[Tensor]:
        pairs = zip(totals, slopes(times[point]), strict=True)
        return [total + weights[point] * slope for total, slope in pairs]

    integrals: list[Tensor] = ops.fori_loop(0, PATH_POINTS, add, start)
    return integrals


@dataclasses.dataclass(kw_only=True)
class NestedTape(InnerLoop):
    """The inner loop of any head: a nested gradient tape, vectorized over the examples.

    Memory grows with batch size, dictionary size and steps: each example has its own
    weights and activations.
    """

    head: keras.layers.Layer

    def outputs(self, entries: Entries, attention: Tensor, queries: Tensor) -> Tensor:
        def predict_one(example: tuple[Tensor, Tensor]) -> Tensor:
            query, attention = example
            return self._call_head(self._finetune(entries, attention), query[None])[0]

        return backend.vectorized_map(predict_one, (queries, attention))

    def weights(self, entries: Entries, attention: Tensor) -> list[Tensor]:
        finetune = functools.partial(self._finetune, entries)
        return list(backend.vectorized_map(finetune, attention))

    def _finetune(self, entries: Entries, attention: Tensor) -> list[Tensor]:
        """Returns the weights for one example, given its attention `(entries,)`."""

        def inner_loss(weights: list[Tensor]) -> tuple[Tensor, None]:
            losses = self.loss(entries.values, self._call_head(weights, entries.keys))
            return ops.sum(attention * losses), None  # MN Algorithm 1, line 6.

        require_plain_layers(self.head)
        rates = self.learning_rate.rates()
        weights = [*map(ops.convert_to_tensor, finetuned_variables(self.head))]
        for _ in range(self.steps):
            gradients, _nothing = gradients_of(inner_loss, weights)
            # MN Algorithm 1, line 7, on a nested tape: MN Eq. (3). Without a backbone it is
            # MN Eq. (1).
            weights = [
                weight - rate * gradient
                for weight, rate, gradient in zip(weights, rates, gradients, strict=True)
            ]
        return weights

    def _call_head(self, weights: list[Tensor], inputs: Tensor) -> Tensor:
        """Calls the head with other values for the finetuned variables."""
        # Every variable, since a StatelessScope hides enclosing ones; later pairs win.
        values = [(each, ops.convert_to_tensor(each)) for each in self.head.variables]
        values += zip(finetuned_variables(self.head), weights, strict=True)
        with keras.StatelessScope(state_mapping=values):
            return self.head(inputs)
