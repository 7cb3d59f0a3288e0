"""Inner loops, their losses and learning rates, and the loop for any head.

An inner loop finetunes a head for each example on a dictionary's entries, weighted by the
example's attention. `NestedTape` works for any head; `DualForm`, in `dual_form.py`, works
for dense heads at a fraction of the cost, with the same results.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
from keras import ops

from nsl_keras import backend, validation
from nsl_keras.backend import Tensor, gradients_of, gradients_of_columns
from nsl_keras.neighborhoods.explain import average_over_path

#: An inner loss `loss(values, outputs)`, per entry.
InnerLoss = Callable[[Tensor, Tensor], Tensor]


class Entries(NamedTuple):
    """Keys `(entries, features)` and values `(entries, outputs)` to finetune a head on."""

    keys: Tensor
    values: Tensor


# The losses are written out: with a fused softmax cross-entropy, the second derivative with
# respect to the labels is zero, and the dictionary's values would never train.


def cross_entropy(values: Tensor, logits: Tensor) -> Tensor:
    """Returns `logsumexp(f) * sum(v) - sum(v * f)` over the last axis."""
    total = ops.logsumexp(logits, axis=-1) * ops.sum(values, axis=-1)
    return total - ops.sum(values * logits, axis=-1)


def squared_error(values: Tensor, outputs: Tensor) -> Tensor:
    """Returns `sum((f - v)^2)` over the last axis."""
    return ops.sum(ops.square(outputs - values), axis=-1)


#: The inner loss of each task, and a bound of its curvature along any change of outputs.
LOSSES = {"classification": cross_entropy, "regression": squared_error}
CURVATURES = {"classification": 0.5, "regression": 2.0}


@keras.saving.register_keras_serializable("nsl_keras")
class InnerLearningRate(keras.layers.Layer):
    """Learning rates for a list of weights; each broadcasts against its weight.

    The `form` is the `learning_rate_form` of `MetaNeighborhoodHead`, `initial` its
    `inner_learning_rate`.
    """

    def __init__(self, initial: float, form: str = "scalar", **kwargs: Any) -> None:
        super().__init__(**{"name": "inner_learning_rate", **kwargs})
        self.initial = validation.positive_number(initial, "inner_learning_rate")
        forms = ("scalar", "diagonal", "fixed")
        self.form = validation.one_of(form, forms, "learning_rate_form")
        self._precision = backend.wide_dtype(self.variable_dtype)

    def build_for(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Creates the learning rates for weights of these shapes."""
        by_row = [(*shape[:1], *[1] * len(shape[1:])) for shape in shapes]
        by_row = [shape if len(shape) > 1 else () for shape in by_row]
        of_form: dict[str, Any] = {"scalar": [()], "diagonal": by_row, "fixed": []}
        start = keras.initializers.Constant(self.initial)
        for index, shape in enumerate(of_form[self.form]):
            name = f"inner_learning_rate_{index}"
            raw = self.add_weight(name=name, shape=shape, initializer=start, autocast=False)
            # An attribute each: `tf.train.Checkpoint` misses the variables in a list.
            setattr(self, f"raw_rate_{index}", raw)
        self.num_weights = len(shapes)
        self.built = True

    def rates(self) -> list[Tensor]:
        """Returns the learning rates, in the order of the shapes given to `build_for`."""
        if self.form == "fixed":
            return [ops.convert_to_tensor(self.initial, self._precision)] * self.num_weights
        rates = [ops.abs(ops.cast(raw, self._precision)) for raw in self.weights]
        return rates * self.num_weights if self.form == "scalar" else rates

    def limit(self, largest: Tensor) -> None:
        """Lowers larger learning rates to a bound; fixed learning rates stay."""
        for raw in self.weights:
            raw.assign(ops.clip(raw, -largest, largest))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "initial": self.initial, "form": self.form}


@dataclasses.dataclass(eq=False)
class InnerLoop(abc.ABC):
    """Per-example finetuning of a head, by Eq. (3) of Meta-Neighborhoods.

        phi_z = phi - rate * d/dphi sum_j w_j(z) L(f_phi(k_j), v_j)        (steps times)

    It finetunes the `variables` with learning rates that were built for their shapes.
    """

    variables: list[Any]
    learning_rate: InnerLearningRate
    steps: int
    loss: InnerLoss

    @abc.abstractmethod
    def outputs(self, entries: Entries, attention: Tensor, queries: Tensor) -> Tensor:
        """Returns each query's outputs `(batch, outputs)` of the head finetuned for it.

        The attention has shape `(batch, entries)`, the queries `(batch, features)`.
        """

    @abc.abstractmethod
    def weights(self, entries: Entries, attention: Tensor) -> list[Tensor]:
        """Returns each example's finetuned weights, tensors `(batch, *variable_shape)`."""

    def effects(self, entries: Entries, attention: Tensor, queries: Tensor) -> Tensor:
        """Returns each entry's share in the change of each output; see `explain.py`.

        The shape is `(batch, entries, outputs)`.
        """

        def slopes(time: Tensor) -> list[Tensor]:
            return gradients_of_columns(
                lambda weights: self.outputs(entries, weights, queries), time * attention
            )

        start = [ops.zeros_like(attention)] * entries.values.shape[-1]
        shares = [attention * slope for slope in average_over_path(slopes, start)]
        return ops.stack(shares, axis=-1)


class NestedTape(InnerLoop):
    """The inner loop of any head: a nested gradient tape, vectorized over the examples.

    It holds the head's weights and activations once per example, so memory grows with
    batch size, dictionary size and steps.
    """

    def __init__(
        self,
        head: keras.layers.Layer,
        learning_rate: InnerLearningRate,
        steps: int = 1,
        loss: InnerLoss = cross_entropy,
    ) -> None:
        # `adapts = False` marks variables that are trained, but not finetuned.
        variables = [each for each in head.variables if getattr(each, "adapts", True)]
        super().__init__(variables, learning_rate, steps, loss)
        self.head = head

    def outputs(self, entries: Entries, attention: Tensor, queries: Tensor) -> Tensor:
        def predict_one(example: tuple[Tensor, Tensor]) -> Tensor:
            query, attention = example
            return self._call_head(self._finetune(entries, attention), query[None])[0]

        return backend.vectorized_map(predict_one, (queries, attention))

    def weights(self, entries: Entries, attention: Tensor) -> list[Tensor]:
        finetune = functools.partial(self._finetune, entries)
        weights: list[Tensor] = backend.vectorized_map(finetune, attention)
        return weights

    def _finetune(self, entries: Entries, attention: Tensor) -> list[Tensor]:
        """Returns the weights of one example, whose attention has shape `(entries,)`."""

        def inner_loss(weights: list[Tensor]) -> tuple[Tensor, None]:
            losses = self.loss(entries.values, self._call_head(weights, entries.keys))
            return ops.sum(attention * losses), None  # MN Algorithm 1, line 6.

        rates = self.learning_rate.rates()
        weights = [ops.convert_to_tensor(variable) for variable in self.variables]
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
        values += zip(self.variables, weights, strict=True)
        with keras.StatelessScope(state_mapping=values):
            return self.head(inputs)
