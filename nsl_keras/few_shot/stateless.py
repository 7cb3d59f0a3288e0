"""A Keras model as a function of some of its variables and of its batch statistics.

Nothing here changes the model: values of variables go in as tensors, and the statistics
of batch norms come out as tensors, which gradients run through.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import ops

from nsl_keras import graphs, nesting, validation
from nsl_keras.backend import Tensor, at_least_float32, gradients_of
from nsl_keras.normalization import BatchNormalization, normalizing_by_batch
from nsl_keras.similarity.with_similarity import forms_in

Selection: TypeAlias = str | Collection[str] | Sequence[int]

POLICIES = ("support", "transductive", "moving")


def select_variables(
    model: keras.Model, selection: Selection, argument: str = "inner_variables"
) -> list[Any]:
    """Returns a built model's trainable variables that a selection names, in order.

    The selection is as `inner_variables` of `MAML`, or indices into `model.variables`. In a
    model that is frozen as a whole, all variables may adapt: freezing concerns training.
    """
    parts: list[Any] = selection.split("+") if isinstance(selection, str) else [*selection]
    if parts and all(isinstance(each, int) for each in parts):
        return [model.variables[place] for place in parts]
    variables = model.trainable_variables
    if not variables:
        with nesting.unfrozen(model):
            variables = model.trainable_variables
    found = [{*map(id, variables)} & {*map(id, _named(model, part))} for part in parts]
    demand = (
        '"all", "classifier", "similarity" or "predictor", or names, each of which matches '
        f"one of the trainable variables {[each.path for each in variables]} (layers with "
        "trainable=False have none)"
    )
    validation.require(found and all(found), argument, demand, selection)
    return [each for each in variables if any(id(each) in ids for ids in found)]


def _named(model: keras.Model, part: Any) -> list[Any]:
    """Returns the variables that one part of a selection names, frozen ones included."""
    if part == "all":
        return model.variables
    if part == "classifier":
        return graphs.classifier_of(model).variables
    if part == "similarity":
        layers = nesting.sublayers(model)
        return [getattr(each, "similarity_parameters", None) for each in layers]
    if part == "predictor":
        networks = [form.network for form in forms_in(model) if form.network]
        return [each for network in networks for each in network.variables]
    return [each for each in model.variables if part in (each.name, each.path)]


def batch_norms(model: Any) -> list[Any]:
    """Returns the batch norms in a model, of Keras and of this package."""
    layers = nesting.sublayers(model)
    return [each for each in layers if isinstance(each, keras.layers.BatchNormalization)]


class StatelessModel:
    """The outputs of a built model, with other values in some of its variables.

    All layers run in inference mode, but the policy, `batch_normalization` of `MAML`, may
    make trainable batch norms normalize by batches.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Collection[keras.Variable] = (),
        batch_normalization: str = "support",
    ) -> None:
        self.model = model
        chosen = set(map(id, variables))
        self._variables = [each for each in model.variables if id(each) in chosen]
        self._paths = {each.path for each in model.variables}
        self.batch_normalization = batch_normalization
        self._batch_norms = batch_norms(model)
        self.norms()  # Raises if they cannot normalize by batches.

    @property
    def variables(self) -> list[Any]:
        """The variables that are given other values, in the model's order."""
        changed = self._paths ^ {each.path for each in self.model.variables}
        demand = (
            "a model that keeps its variables: quantize it or enable LoRA before you make "
            "a learner of it, or change what `adapt` returns"
        )
        validation.require(not changed, "model", demand, sorted(changed))
        return self._variables

    def norms(self) -> list[BatchNormalization]:
        """Returns the batch norms that normalize by batches, or raises if they cannot."""
        if self.batch_normalization == "moving":
            return []
        norms = [each for each in self._batch_norms if each.trainable]
        unfit = [each.name for each in norms if not isinstance(each, BatchNormalization)]
        demand = (
            f'"moving" with the trainable batch norms {unfit} of Keras. To normalize by '
            "the examples of an episode, convert the model with "
            "`nsl_keras.convert.convert_batch_norms(model)`, or freeze its batch norms"
        )
        policy = self.batch_normalization
        validation.require(not unfit, "batch_normalization", demand, policy)
        return norms

    def values(self) -> list[Tensor]:
        """Returns the model's own values of the `variables`."""
        return [ops.convert_to_tensor(variable) for variable in self.variables]

    def outputs(
        self,
        values: Sequence[Tensor],
        examples: Tensor,
        statistics: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the outputs, in float32 or wider, and the values of `statistics`.

        Batch norms normalize by given statistics or, without them, by the examples'.
        """
        norms = self.norms()
        variables = statistics_of(norms)
        # Every variable needs a value: the scope hides outer scopes. The last value wins.
        state = [(each, ops.convert_to_tensor(each)) for each in self.model.variables]
        state += zip(self.variables, values, strict=True)
        if statistics is not None:
            state += zip(variables, statistics, strict=True)
            norms = []
        with keras.StatelessScope(state) as scope, normalizing_by_batch(norms):
            outputs = self.model(examples, training=False)
        found = [scope.get_current_value(each) for each in variables]
        return at_least_float32(outputs), found

    def query_outputs(
        self, values: Sequence[Tensor], support: Tensor, queries: Tensor
    ) -> Tensor:
        """Returns the outputs for queries under the policy, in float32 or wider."""
        statistics = None
        if self.batch_normalization == "support" and self.norms():
            _, statistics = self.outputs(values, support)
        return self.outputs(values, queries, statistics)[0]


def statistics_of(norms: Sequence[BatchNormalization]) -> list[Any]:
    """Returns the moving statistics of batch norms: mean, variance, mean, ..."""
    return [each for norm in norms for each in (norm.moving_mean, norm.moving_variance)]


def check_second_order(
    model: keras.Model, x: Any, step: float = 1e-3, seed: int = 0
) -> float:
    """Returns the relative error of a model's second derivative in a random direction.

    Some TensorFlow operations have no second derivative, which a tape leaves out without an
    error. With `L = mean(outputs^2)`, the weights `w` and a random direction `d`,

        slope(t) = d/dt L(w + t d)
        exact    = d/dt slope(t)  at t = 0
        measured = (slope(h) - slope(-h)) / (2 h)
        error    = |exact - measured| / max(|exact|, |measured|)

    Below about 0.01 the derivatives are exact, at 1 they are missing. A network with kinks
    (ReLU, max pooling) needs float64 and a `step` of 1e-6, or measures too large an error.

    Args:
        model: A built model, which runs in inference mode.
        x: Batch of the model's inputs; two examples suffice.
        step: float above 0, `h` relative to the length of the weights.
        seed: int, fixes the direction.

    Example:

    >>> import keras
    >>> from nsl_keras import few_shot
    >>> smooth = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh")])
    >>> few_shot.check_second_order(smooth, keras.ops.ones((2, 3))) < 0.01
    True
    """
    validation.require_built(model, "check_second_order")
    validation.positive_number(step, "step")
    stateless = StatelessModel(model, model.trainable_variables, "moving")
    start = [*map(ops.convert_to_numpy, stateless.values())]
    draw = np.random.default_rng(seed).normal
    drawn = [draw(size=each.shape) for each in start]
    own, other = (np.sqrt(sum(np.sum(v**2) for v in each)) for each in (start, drawn))
    pairs = zip(start, drawn, strict=True)
    along = [(own / other * way).astype(each.dtype) for each, way in pairs]

    def loss(time: list[Tensor]) -> tuple[Tensor, None]:
        pairs = zip(start, along, strict=True)
        moved = [each + ops.cast(time[0], each.dtype) * way for each, way in pairs]
        return ops.mean(ops.square(stateless.outputs(moved, x)[0])), None

    def slope(time: list[Tensor]) -> tuple[Tensor, None]:
        return gradients_of(loss, time)[0][0], None

    def at(time: float) -> list[Tensor]:
        return [ops.convert_to_tensor(time, start[0].dtype)]

    exact = float(gradients_of(slope, at(0.0))[0][0])
    measured = float(slope(at(step))[0] - slope(at(-step))[0]) / (2 * step)
    return abs(exact - measured) / (max(abs(exact), abs(measured)) or 1.0)
