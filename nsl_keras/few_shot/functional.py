"""A Keras model as a function of some of its variables and of its batch statistics.

Nothing here changes the model: values of variables go in as tensors, and the statistics
of batch norms come out as tensors, which gradients run through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias, TypeGuard

import keras
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.similarity.neural_similarity import BilinearForm
from nsl_keras.training.normalization import (
    BatchNormalization,
    BatchStatistics,
    move_statistics,
    normalizing_by_batch,
)

Selection: TypeAlias = str | Sequence[str] | Sequence[int] | Callable[[Any], bool]

SELECTIONS = ("similarity", "predictor", "classifier", "all")
POLICIES = ("support", "transductive", "moving")


def select_variables(
    model: keras.Model, selection: Selection, argument: str = "inner_variables"
) -> list[Any]:
    """Returns the trainable variables of a built model that a selection names.

    Frozen parts (`trainable=False`) do not adapt. In a model that is frozen as a whole,
    all variables may adapt: its freezing concerns training only.

    Args:
        model: A built model.
        selection: See `inner_variables` of `MAML`; or a list of places in
            `model.variables`, which may be frozen.
        argument: Name of the argument, for the message.

    Returns:
        The variables, in the model's order.

    Raises:
        ValueError: If the selection, or a part of it, matches no trainable variable.
    """
    if _holds(selection, int):
        return [model.variables[place] for place in selection]
    variables = model.trainable_variables
    if not variables:
        with rewiring.unfrozen(model):
            variables = model.trainable_variables
    parts = _parts(model, selection, argument)
    for name, matches in parts.items():
        if not any(map(matches, variables)):
            frozen = len(variables) < len(model.variables)
            raise ValueError(
                f"`{argument}` must match trainable variables of the model, which are: "
                f"{', '.join(each.path for each in variables) or 'none at all'}"
                f"{' (layers with trainable=False have none)' if frozen else ''}. "
                f"Received: {argument}={selection!r}, of which {name} matches none of them"
            )
    return [each for each in variables if any(take(each) for take in parts.values())]


def _holds(selection: Any, kind: type) -> TypeGuard[Collection[Any]]:
    """Whether a selection is a collection, not empty, of values of one type."""
    return (
        isinstance(selection, Collection)
        and len(selection) > 0
        and all(isinstance(each, kind) for each in selection)
    )


def _parts(
    model: keras.Model, selection: Selection, argument: str
) -> dict[str, Callable[[Any], bool]]:
    """Returns a test of variables for each part of a selection, by the part's name."""
    if callable(selection):
        return {"it": selection}
    if isinstance(selection, str):
        parts = selection.split("+")
        for each in parts:
            validation.one_of(each, SELECTIONS, argument)
        last = last_layer_with_weights(model).variables if "classifier" in parts else []
        classifier = set(map(id, last))
        predicting = {
            id(variable)
            for layer in rewiring.sublayers(model)
            if isinstance(layer, BilinearForm) and layer.network is not None
            for variable in layer.network.variables
        }
        kinds: dict[str, Callable[[Any], bool]] = {
            "all": lambda variable: True,
            "similarity": lambda variable: variable.name == "similarity",
            "predictor": lambda variable: id(variable) in predicting,
            "classifier": lambda variable: id(variable) in classifier,
        }
        return {repr(each): kinds[each] for each in parts}
    if _holds(selection, str):

        def has_name(name: str) -> Callable[[Any], bool]:
            return lambda variable: name in (variable.name, variable.path)

        return {repr(name): has_name(str(name)) for name in selection}
    raise ValueError(
        f"`{argument}` must be one of {', '.join(map(repr, SELECTIONS))}, some of them "
        "joined by +, a collection of variables' names, or a function of a variable. "
        f"Received: {argument}={selection!r}"
    )


def last_layer_with_weights(model: keras.Model) -> keras.layers.Layer:
    """Returns the last layer with weights, not itself a model, that a built model calls."""
    is_graph = rewiring.is_graph(model)
    layers = rewiring.layers(model) if is_graph else model.layers
    if not is_graph and sum(bool(layer.weights) for layer in layers) > 1:
        raise ValueError(
            "`model` must be functional or Sequential: others do not show which layer is "
            "the classifier. You can select variables by their names. "
            f"Received: model {model.name!r} of type {type(model).__name__}"
        )
    for layer in reversed(layers):
        if isinstance(layer, keras.Model):
            if layer.weights:
                return last_layer_with_weights(layer)
        elif layer.weights:
            return layer
    raise ValueError(f"`model` must have weights. Received: model {model.name!r}")


def effective_policy(model: keras.Model, policy: str) -> str | None:
    """Returns the policy that a model's batch norms follow: frozen ones follow "moving"."""
    norms = _batch_norms(model)
    if not norms:
        return None
    return policy if any(each.trainable for each in norms) else "moving"


def _batch_norms(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    return [
        layer
        for layer in rewiring.sublayers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]


class FunctionalModel:
    """The outputs of a built model, with other values in some of its variables.

    All layers run in inference mode (dropout, noise and augmentation are off). Trainable
    batch norms normalize by batches where the policy demands it; those with
    `trainable=False` keep to their moving statistics.

    Args:
        model: A built Keras model.
        variables: The variables of the model that are given other values.
        batch_normalization: See `MAML`.

    Attributes:
        variables: The variables that are given other values, in the model's order.

    Raises:
        ValueError: If a trainable batch norm of Keras would have to normalize by batches.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Collection[keras.Variable] = (),
        batch_normalization: str = "support",
    ) -> None:
        self.model = model
        chosen = set(map(id, variables))
        self.variables = [each for each in model.variables if id(each) in chosen]
        self.batch_normalization = batch_normalization
        self._norms = _batch_norms(model)
        if batch_normalization != "moving":
            self._require_convertible_norms()

    @property
    def norms(self) -> list[BatchNormalization]:
        """The trainable batch norms, which must be able to normalize by batches."""
        self._require_convertible_norms()
        return [each for each in self._norms if each.trainable]

    def _require_convertible_norms(self) -> None:
        for layer in self._norms:
            if layer.trainable and not isinstance(layer, BatchNormalization):
                raise ValueError(
                    "Trainable batch norms must be `nsl_keras.layers.BatchNormalization` "
                    "to normalize by the examples of an episode. Convert the model with "
                    "`nsl_keras.convert.convert_batch_norms(model)` or freeze them, or, if "
                    'you do not train it, pass batch_normalization="moving". Received: '
                    "batch_normalization="
                    f"{self.batch_normalization!r}, and layer {layer.name!r} of Keras"
                )

    def values(self) -> list[Tensor]:
        """Returns the values that the model's variables have."""
        return [ops.convert_to_tensor(variable) for variable in self.variables]

    def outputs(
        self,
        values: Sequence[Tensor],
        images: Tensor,
        given: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, BatchStatistics]:
        """Returns the outputs under the policy, in float32 or wider, and statistics."""
        # Every variable: a StatelessScope hides the scopes around it. Later values count.
        state = [(each, ops.convert_to_tensor(each)) for each in self.model.variables]
        state += zip(self.variables, values, strict=True)
        by_batch: contextlib.AbstractContextManager[BatchStatistics] = (
            contextlib.nullcontext(BatchStatistics())
            if self.batch_normalization == "moving"
            else normalizing_by_batch(given)
        )
        with keras.StatelessScope(state), by_batch as statistics:
            outputs = self.model(images, training=False)
        return at_least_float32(outputs), statistics

    def query_outputs(
        self, values: Sequence[Tensor], support_images: Tensor, query_images: Tensor
    ) -> Tensor:
        """Returns the outputs for queries under the policy, in float32 or wider."""
        given = None
        if self.batch_normalization == "support" and self.norms:
            given = self.outputs(values, support_images)[1].values
        return self.outputs(values, query_images, given)[0]

    def batch_statistics(self, values: Sequence[Tensor], images: Tensor) -> list[Tensor]:
        """Returns, under "moving", the mean and variance of a batch at each norm."""
        with normalizing_by_batch() as found:
            self.outputs(values, images)
        pairs = zip(found.values[::2], found.values[1::2], strict=True)
        of_layer = dict(zip(map(id, found.layers), pairs, strict=True))
        return [each for layer in self.norms for each in of_layer[id(layer)]]


def move_by_episodes(
    layers: Sequence[BatchNormalization], statistics: Sequence[Tensor], examples: Any
) -> None:
    """Moves moving statistics towards those of all episodes of a batch together."""
    pairs = zip(layers, statistics[::2], statistics[1::2], strict=True)
    for layer, means, variances in pairs:
        variance = ops.mean(variances, axis=0) + ops.var(means, axis=0)
        move_statistics(layer, ops.mean(means, axis=0), variance, examples)
