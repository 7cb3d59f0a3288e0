"""The layer that adapts a head to each example's neighbors, then predicts.

The gradients of the inner loss at the dictionary's entries do not depend on the query, and
cost far more than the rest of a prediction. `predict`, `evaluate`, `neighbors` and exports
compute them once per call, just before the first batch (after callbacks that change
weights, as `keras.callbacks.SwapEMAWeights`), and keep them in `Constants`.

Everywhere else, for example in `model(x)` or in your own training loop, `test_step` or
`predict_step` (which may change weights), each call computes all of it, differentiably.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
from absl import logging
from keras import ops

from nsl_keras import configs, nesting, validation
from nsl_keras.backend import Tensor, largest, leave_out_of_xla, wide_dtype
from nsl_keras.graphs import require_linear
from nsl_keras.neighborhoods import inner_loop as loops
from nsl_keras.neighborhoods.cosine import CosineDense
from nsl_keras.neighborhoods.dictionary import NeighborDictionary
from nsl_keras.neighborhoods.dual_form import DualForm, stages_of
from nsl_keras.neighborhoods.inner_loop import LOSSES, InnerLearningRate


class Neighbors(NamedTuple):
    """The dictionary entries that an example attends to, or that moved its outputs most.

    Compare `after` with `before` first: entries explain a prediction only as far as
    adaptation changed it.

    Attributes:
        indices: Entry numbers, of shape `(batch, k)`, strongest entry first.
        weights: Attention weights, of the same shape.
        values: Probabilities or targets of the entries, of shape `(batch, k, outputs)`.
        output_changes: What each entry adds to the logits or regression outputs, of shape
            `(batch, k, outputs)`; `None` without `effects`. Over all entries they sum to
            `after - before`. Each is an integral over the path from no attention to the
            actual attention, computed from 32 points: exact for one step on a `Dense`
            layer, and to rounding on a `CosineDense` layer. Through ReLU layers, and in
            several large steps, the error may be large: compare the sum over all entries
            with `after - before`.
        before: The outputs without adaptation, of shape `(batch, outputs)`.
        after: The outputs with adaptation, of the same shape.
    """

    indices: Any
    weights: Any
    values: Any
    output_changes: Any
    before: Any
    after: Any


class Constants:
    """Variables for the tensors that a function computes; Keras does not track them."""

    def __init__(self, compute: Callable[[], list[Tensor]]) -> None:
        self.compute = compute
        self.held: list[keras.Variable] = []
        #: The variables while they are used, or nothing.
        self.current: list[keras.Variable] = []

    def build(self) -> None:
        options = {"trainable": False, "autocast": False, "name": "constant"}
        self.held = [
            keras.Variable("zeros", each.shape, each.dtype, **options)
            for each in self.compute()
        ]

    def update(self) -> None:
        for own, new in zip(self.held, self.compute(), strict=True):
            own.assign(new)

    @contextlib.contextmanager
    def used(self, update: bool = True) -> Iterator[None]:
        """Lets the head read the constants, updated or not, instead of computing them."""
        if update:
            self.update()
        self.current = self.held
        try:
            yield
        finally:
            self.current = []


@keras.saving.register_keras_serializable("nsl_keras")
class MetaNeighborhoodHead(nesting.KeepsFrozen):
    """Finetunes a head, per example, on a learned dictionary of neighbors, and predicts.

    With features `z`, dictionary `{(k_j, v_j)}` and head `f` with weights `phi`,

        w_j(z)  = softmax_j(sim(z, k_j) / temperature)
        phi_z   = phi - rate * d/dphi sum_j w_j(z) L(f_phi(k_j), v_j)    (inner_steps times)
        outputs = f_{phi_z}(z)

    where `L` is the cross-entropy of the head's logits, or in regression the squared error,
    summed over the outputs, and `rate` is the inner learning rate. Gradients with respect
    to features, head, keys, values and rate include second-order terms. Under a
    mixed-precision policy the layer adapts in float32.

    Args:
        head: A Keras layer or model from features to logits, or to a regression's outputs,
            without state such as moving statistics. The scale of a `CosineDense` layer is
            trained but not adapted; frozen layers are adapted but not trained.
        dictionary: `NeighborDictionary`, or int, the number of a default one's entries.
        inner_steps: int, the inner steps. Above 1, each example stores its own weights.
        inner_learning_rate: float above 0, the initial inner learning rate.
        learning_rate_form: `"scalar"` learns one rate, `"diagonal"` one per row of each
            kernel and one per bias, and `"fixed"` none. Learned rates are absolute values
            of weights.
        task: `"classification"` or `"regression"`.
        inner_loop: `"dual"` computes adaptation as attention over the dictionary, for
            `Dense`, `CosineDense` and `Sequential` stacks of them; `"tape"` uses a
            vectorized nested gradient tape, for any head, with equal results; `"auto"` uses
            the dual form if the head allows it.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        training: bool, whether to leave dictionary entries out.
        adapt: bool; if false, the head predicts without adaptation.
        kept: Boolean tensor of shape `(batch, num_neighbors)` or `(1, num_neighbors)`, the
            dictionary entries that take part; `None` for all, or a draw in training.

    Input shape:
        `(batch, features)`.

    Output shape:
        `(batch, classes)`, logits; or `(batch, outputs)`.

    Raises:
        ValueError: For invalid arguments; at build, for a classifier's head without logits
            of two or more classes, a head that cannot be adapted, or a bad dictionary.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> head = nsl_keras.layers.CosineDense(10)
    >>> dictionary = nsl_keras.layers.NeighborDictionary(100, temperature=0.1)
    >>> layer = nsl_keras.layers.MetaNeighborhoodHead(head, dictionary)
    >>> tuple(layer(keras.ops.ones((2, 64))).shape)
    (2, 10)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.1, Eq. (1) and (3).
    """

    def __init__(
        self,
        head: keras.layers.Layer,
        dictionary: NeighborDictionary | int = 1000,
        inner_steps: int = 1,
        inner_learning_rate: float = 0.05,
        learning_rate_form: str = "scalar",
        task: str = "classification",
        inner_loop: str = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.dtype_policy = keras.dtype_policies.get(self.variable_dtype)
        # Attention and finetuning compute in this dtype.
        self._precision = wide_dtype(self.variable_dtype)
        options: dict[str, Any] = {"dtype": self.dtype_policy}
        is_layer = isinstance(head, keras.layers.Layer)
        validation.require(is_layer, "head", "a Keras layer or model", head)
        if not isinstance(dictionary, NeighborDictionary):
            entries = validation.positive_integer(dictionary, "dictionary")
            dictionary = NeighborDictionary(entries, name="dictionary", **options)
        self.head = head
        self.inner_steps = validation.positive_integer(inner_steps, "inner_steps")
        self.learning_rate = InnerLearningRate(
            inner_learning_rate, learning_rate_form, **options
        )
        self.inner_learning_rate = self.learning_rate.initial
        self.learning_rate_form = self.learning_rate.form
        self.dictionary = dictionary
        self.task = validation.one_of(task, LOSSES, "task")
        kinds = ("auto", "dual", "tape")
        self.inner_loop = validation.one_of(inner_loop, kinds, "inner_loop")
        self._inner_loop = self._make_inner_loop()
        self.constants = Constants(self._compute_constants)
        self.input_spec = keras.layers.InputSpec(ndim=2)

    @property
    def variables(self) -> list[keras.Variable]:
        # JAX runs models on the values of these variables. Files hold `weights`.
        return [*super().variables, *self.constants.held]

    @property
    def active_inner_loop(self) -> str:
        """The inner loop of the built layer, `"dual"` or `"tape"`."""
        validation.require_built(self, "active_inner_loop")
        return "dual" if isinstance(self._inner_loop, DualForm) else "tape"

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        if self.built:
            return  # New rates would replace learned ones.
        features = validation.known_axis(input_shape, -1, "last axis")
        self.input_spec = keras.layers.InputSpec(ndim=2, axes={-1: features})
        self._inner_loop = self._make_inner_loop()  # Of the head as it is now.
        if not self.head.built:
            self.head.build((None, features))
        outputs = self.head.compute_output_shape((None, features))
        least = 2 if self.task == "classification" else 1
        is_matrix = len(outputs) == 2 and isinstance(outputs[-1], int)
        demand = (
            "a layer of one output of shape (batch, classes), with at least two classes "
            "(use `Dense(2)` for a binary classifier), or, with "
            'task="regression", of shape (batch, outputs)'
        )
        validation.require(is_matrix and outputs[-1] >= least, "head", demand, outputs)
        if self.task == "classification":
            require_linear(self.head, "head")
        loops.require_plain_layers(self.head)
        self.dictionary.set_outputs(outputs[-1], self.task)
        if isinstance(self._inner_loop, loops.NestedTape):
            self._require_tape(features)
        variables = loops.finetuned_variables(self.head)
        self.learning_rate.build_for([tuple(each.shape) for each in variables])
        if not self.dictionary.built:
            self.dictionary.build((None, features))
        shape = tuple(self.dictionary.keys.shape)
        demand = f"with keys of the {features} features of the input"
        validation.require(shape[-1] == features, "dictionary", demand, shape)
        nesting.pass_on_frozen(self)

    def _make_inner_loop(self) -> loops.InnerLoop:
        options = self.learning_rate, self.inner_steps, LOSSES[self.task]
        if self.inner_loop != "tape":
            try:
                stages_of(self.head)
                stages = functools.partial(stages_of, self.head)
                return DualForm(*options, stages=stages)
            except ValueError as error:
                if self.inner_loop == "dual":
                    raise
                name = self.name
                logging.info("%s adapts its head on a nested tape: %s", name, str(error))
        leave_out_of_xla(self)
        return loops.NestedTape(*options, head=self.head)

    def _require_tape(self, features: int) -> None:
        with nesting.unfrozen(self.head):
            state = [variable.path for variable in self.head.non_trainable_variables]
        demand = (
            "without state (a batch norm's statistics, a dropout's seed), which finetuning "
            "per example cannot update: move these layers to the backbone"
        )
        validation.require(not state, "head", demand, state)
        outputs = self.head(keras.KerasTensor((None, features), dtype=self.variable_dtype))
        is_wide = outputs.dtype in ("float32", "float64")
        demand = 'of layers with dtype="float32" or wider on the nested tape'
        validation.require(is_wide, "head", demand, outputs.dtype)

    def _compute_constants(self) -> list[Tensor]:
        both = self.dictionary.keys, self.dictionary.values
        entries = loops.Entries(*(ops.cast(each, self._precision) for each in both))
        return self._inner_loop.compute_constants(entries)

    def call(
        self,
        inputs: Tensor,
        training: bool | None = None,
        adapt: bool = True,
        kept: Tensor | None = None,
    ) -> Tensor:
        inputs = ops.convert_to_tensor(inputs, sparse=False)
        if not adapt:
            return ops.cast(self.head(inputs), self.compute_dtype)
        queries = ops.cast(inputs, self._precision)
        constants = () if training else self.constants.current
        found = self.dictionary.look_up(queries, training, kept, constants)
        return ops.cast(self._inner_loop.outputs(*found, queries), self.compute_dtype)

    def adapted_weights(self, features: Tensor, kept: Tensor | None = None) -> list[Tensor]:
        """Returns each example's finetuned weights `(batch, *shape)`, in order."""
        validation.require_built(self, "adapted_weights")
        queries = ops.cast(features, self._precision)
        return self._inner_loop.weights(*self.dictionary.look_up(queries, kept=kept))

    def neighbors(
        self, features: Tensor, k: int = 5, by: str = "attention", effects: bool = False
    ) -> Neighbors:
        """Returns `k` entries per example, as `MetaNeighborhoodModel.neighbors` does."""
        self.require_ranking(k, by, effects)
        queries = ops.cast(features, self._precision)
        found = self.dictionary.look_up(queries, constants=self.constants.current)
        entries, attention = found
        ranked, changes = attention, None
        if effects or by == "effect":
            changes = self._inner_loop.effects(entries, attention, queries)
            ranked = ranked if by == "attention" else ops.sum(ops.abs(changes), axis=-1)
        _, indices = largest(ranked, k)
        if changes is not None:
            changes = ops.take_along_axis(changes, indices[..., None], axis=1)
        return Neighbors(
            indices,
            ops.take_along_axis(attention, indices, axis=1),
            ops.cast(self.dictionary.values_of(indices), queries.dtype),
            changes,
            ops.cast(self.head(features), self._precision),
            self._inner_loop.outputs(*found, queries),
        )

    def limit_rates(self) -> None:
        """Lowers learned inner rates to `1 / (curvature * (mean |key|^2 + 1))`.

        There, a step of a dense layer (the 1 is its bias) does not overshoot the loss of an
        entry of average norm. Inputs of `CosineDense` are normalized.
        """
        first, *_ = getattr(self.head, "layers", [self.head])
        if not isinstance(first, CosineDense):
            keys = ops.cast(self.dictionary.keys, self._precision)
            square = ops.mean(ops.sum(ops.square(keys), axis=-1))
            # A bound of the inner loss's curvature along any change of outputs.
            curvature = 0.5 if self.task == "classification" else 2.0
            most = 1 / (curvature * (square + 1))
            for raw in self.learning_rate.weights:
                raw.assign(ops.clip(raw, -most, most))

    def require_ranking(self, k: int, by: str, effects: bool) -> None:
        """Raises unless these are arguments of `neighbors`, and the layer is built."""
        validation.require_built(self, "neighbors")
        validation.one_of(by, ("attention", "effect"), "by")
        validation.boolean(effects, "effects")
        entries = self.dictionary.num_neighbors
        demand = f"at most the number of dictionary entries, {entries}"
        fits = validation.positive_integer(k, "k") <= entries
        validation.require(fits, "k", demand, k)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        return tuple(self.head.compute_output_shape(tuple(input_shape)))

    def get_config(self) -> dict[str, Any]:
        serialize = keras.saving.serialize_keras_object
        return {
            **super().get_config(),
            "head": serialize(self.head),
            "dictionary": serialize(self.dictionary),
            "inner_steps": self.inner_steps,
            "inner_learning_rate": self.inner_learning_rate,
            "learning_rate_form": self.learning_rate_form,
            "task": self.task,
            "inner_loop": self.inner_loop,
        }

    from_config = classmethod(configs.from_arguments)
