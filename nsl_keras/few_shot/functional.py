"""A Keras model as a function of some of its variables and of its batch statistics.

Nothing here changes the model: values of variables go in as tensors, and the statistics
of batch norms come out as tensors, which gradients run through.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import keras
from keras import ops

from nsl_keras import graphs, nesting
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.training.normalization import (
    BatchNormalization,
    move_statistics,
    normalizing_by_batch,
)

Selection: TypeAlias = str | Collection[str] | Sequence[int]

POLICIES = ("support", "transductive", "moving")


def select_variables(
    model: keras.Model, selection: Selection, argument: str = "inner_variables"
) -> list[Any]:
    """Returns the trainable variables of a built model that a selection names, in order.

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
    if not found or not all(found):
        raise ValueError(
            f'`{argument}` must be "all", "classifier", "similarity" or "predictor", '
            "or names of trainable variables, and each must match one (layers with "
            "trainable=False have none). Received: "
            f"{argument}={selection!r} for a model with the trainable variables "
            f"{[each.path for each in variables]}"
        )
    return [each for each in variables if any(id(each) in ids for ids in found)]


def _named(model: keras.Model, part: Any) -> list[Any]:
    """Returns the variables that one part of a selection names, frozen ones included."""
    if part == "all":
        return model.variables
    if part == "classifier":
        return classifier_of(model).variables
    if part in ("similarity", "predictor"):
        forms = [
            layer
            for layer in nesting.sublayers(model)
            if hasattr(layer, "similarity_parameters")
        ]
        if part == "similarity":
            return [each.similarity_parameters for each in forms]
        networks = [getattr(each, "network", None) for each in forms]
        return [v for network in networks if network for v in network.variables]
    return [each for each in model.variables if part in (each.name, each.path)]


def classifier_of(model: keras.Model) -> keras.layers.Layer:
    """Returns the only layer with weights that the outputs reach without another."""
    weighted = [each for each in model.layers if each.weights]
    if graphs.is_graph(model):
        layer, _ = graphs.ending(model)
    else:  # Its order does not show.
        layer = weighted[0] if len(weighted) == 1 else None
    if layer is None:
        raise ValueError(
            "`model` must be functional or Sequential and end in one layer with weights, "
            "its classifier; or select variables by their names. Received: model "
            f"{model.name!r} of the layers {[each.name for each in weighted]}"
        )
    return classifier_of(layer) if isinstance(layer, keras.Model) else layer


def effective_policy(model: keras.Model, policy: str) -> str | None:
    """Returns the policy that a model's batch norms follow: frozen ones follow "moving"."""
    norms = _batch_norms(model)
    if not norms:
        return None
    return policy if any(each.trainable for each in norms) else "moving"


def _batch_norms(model: keras.Model) -> list[Any]:
    layers = nesting.sublayers(model)
    return [each for each in layers if isinstance(each, keras.layers.BatchNormalization)]


class FunctionalModel:
    """The outputs of a built model, with other values in some of its variables.

    All layers run in inference mode. Trainable batch norms normalize by batches if the
    policy, `batch_normalization` of `MAML`, demands it; frozen batch norms always use their
    moving statistics.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Collection[keras.Variable] = (),
        batch_normalization: str = "support",
    ) -> None:
        self.model = model
        chosen = set(map(id, variables))
        self._known = [*model.variables]
        self._variables = [each for each in model.variables if id(each) in chosen]
        self.batch_normalization = batch_normalization
        self._norms = _batch_norms(model)
        if batch_normalization != "moving":
            self.trainable_norms()

    def require_kept(self) -> None:
        """Raises if the model has lost or gained variables."""
        known, present = (
            {id(v): v.path for v in each} for each in (self._known, self.model.variables)
        )
        changed = known.keys() ^ present.keys()
        if changed:
            paths = sorted((known | present)[each] for each in changed)
            raise ValueError(
                "`model` must keep its variables: quantize it or enable LoRA before you "
                "make a learner of it, or change what `adapt` returns. Received: model "
                f"{self.model.name!r}, which lost or gained {paths}"
            )

    @property
    def variables(self) -> list[Any]:
        """The variables that are given other values, in the model's order."""
        self.require_kept()
        return self._variables

    def trainable_norms(self) -> list[BatchNormalization]:
        """Returns the trainable batch norms, which must be able to normalize by batches."""
        norms = [each for each in self._norms if each.trainable]
        for layer in norms:
            if not isinstance(layer, BatchNormalization):
                raise ValueError(
                    "Trainable batch norms must be `nsl_keras.layers.BatchNormalization` "
                    "to normalize by the examples of an episode. Convert the model with "
                    "`nsl_keras.convert.convert_batch_norms(model)` or freeze them, or, if "
                    'you do not train it, pass batch_normalization="moving". Received: '
                    "batch_normalization="
                    f"{self.batch_normalization!r}, and layer {layer.name!r} of Keras"
                )
        return norms

    def values(self) -> list[Tensor]:
        """Returns the values that the model's variables have."""
        return [ops.convert_to_tensor(variable) for variable in self.variables]

    def outputs(
        self,
        values: Sequence[Tensor],
        examples: Tensor,
        statistics: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the outputs, in float32 or wider, and the values of `statistics`.

        The `values` are those of the `variables`. Batch norms normalize by given values of
        the statistics or, without them, by those of the examples.
        """
        norms = [] if self.batch_normalization == "moving" else self.trainable_norms()
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
        if self.batch_normalization == "support" and self.trainable_norms():
            _, statistics = self.outputs(values, support)
        return self.outputs(values, queries, statistics)[0]


def statistics_of(norms: Sequence[BatchNormalization]) -> list[Any]:
    """Returns the moving statistics of batch norms: mean, variance, mean, ..."""
    return [each for norm in norms for each in (norm.moving_mean, norm.moving_variance)]


def move_by_episodes(
    norms: Sequence[BatchNormalization], statistics: Sequence[Tensor], sizes: Tensor
) -> None:
    """Moves moving statistics toward those of all examples of a batch of episodes.

    `statistics` are those of several sets, in the order of `statistics_of` and of shape
    `(sets, channels)`; the sets have `sizes` examples.
    """
    pairs = zip(statistics[::2], statistics[1::2], strict=True)
    for norm, (means, variances) in zip(norms, pairs, strict=True):
        examples = ops.cast(sizes, means.dtype)
        shares = (examples / ops.sum(examples))[:, None]
        mean = ops.sum(shares * means, axis=0)
        within = variances + ops.square(means - mean)
        move_statistics(norm, mean, ops.sum(shares * within, axis=0), ops.sum(examples))
