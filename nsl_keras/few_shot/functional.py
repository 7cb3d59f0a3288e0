"""A Keras classifier as a function of some of its variables and of its batch statistics.

Nothing here changes the model: values of variables go in as tensors, and the statistics
of batch norms come out as tensors, through which gradients run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import keras
from keras import ops

from nsl_keras import rewiring, validation
from nsl_keras.backend import Tensor, at_least_float32, max_pooling
from nsl_keras.training.checks import require_logits
from nsl_keras.training.normalization import (
    BatchNormalization,
    NormalizationByBatch,
    called_twice,
    move_statistics,
    normalizing_by_batch,
    telling_statistics,
)

Selection: TypeAlias = str | Collection[str] | Callable[[Any], bool]

SELECTIONS = ("similarity", "classifier", "similarity+classifier", "all")
POLICIES = ("support", "transductive", "moving")


def select_variables(
    model: keras.Model, selection: Selection, argument: str = "inner_variables"
) -> list[Any]:
    """Returns the trainable variables of a built model that a selection stands for.

    Freezing part of a model (`trainable=False`) keeps that part from adapting; in a model
    that is frozen as a whole, freezing is about training alone, and all may adapt.

    Args:
        model: A built model.
        selection: `"similarity"`, the parameters of the static similarities;
            `"classifier"`, the variables of the last layer with weights;
            `"similarity+classifier"`, both; `"all"`; a collection of names or paths of
            variables; or a function that takes a variable and returns whether to take it.
        argument: Name of the argument, for the message.

    Returns:
        The variables, in the model's order.

    Raises:
        ValueError: If the selection, or a name of it, matches no trainable variable.
    """
    if not model.trainable_variables:
        with rewiring.unfrozen(model):
            return _select(model, selection, argument)
    return _select(model, selection, argument)


def _select(model: keras.Model, selection: Selection, argument: str) -> list[Any]:
    variables = model.trainable_variables
    if callable(selection):
        chosen = [variable for variable in variables if selection(variable)]
    elif isinstance(selection, str):
        validation.one_of(selection, SELECTIONS, argument)
        chosen = list(variables) if selection == "all" else []
        wanted: set[int] = set()
        if "similarity" in selection:
            # By itself too: the other part must not hide a missing one.
            found = [each for each in variables if each.name == "similarity"]
            _require_match(found, "'similarity'", selection, model, argument)
            wanted.update(map(id, found))
        if "classifier" in selection:
            found = last_layer_with_weights(model).trainable_variables
            _require_match(found, "'classifier'", selection, model, argument)
            wanted.update(map(id, found))
        chosen += [each for each in variables if id(each) in wanted]
    elif isinstance(selection, Collection) and all(
        isinstance(each, str) for each in selection
    ):
        for name in selection:
            matching = [each for each in variables if name in (each.name, each.path)]
            _require_match(matching, repr(name), selection, model, argument)
        chosen = [
            each for each in variables if each.name in selection or each.path in selection
        ]
    else:
        raise ValueError(
            f"`{argument}` must be one of {', '.join(map(repr, SELECTIONS))}, a collection "
            "of variables' names, or a function that takes a variable. "
            f"Received: {argument}={selection!r}"
        )
    _require_match(chosen, "it", selection, model, argument)
    return chosen


def _require_match(
    chosen: Sequence[Any],
    part: str,
    selection: Selection,
    model: keras.Model,
    argument: str,
) -> None:
    """Raises if a part of a selection matches nothing."""
    if chosen:
        return
    variables = model.trainable_variables
    names = ", ".join(each.path for each in variables) or "none at all"
    frozen = len(variables) < len(model.variables)
    raise ValueError(
        f"`{argument}` must match trainable variables of the model, which are: {names}"
        f"{' (layers with trainable=False have none)' if frozen else ''}. "
        f"Received: {argument}={selection!r}, of which {part} matches none of them"
    )


def effective_policy(model: keras.Model, policy: str) -> str | None:
    """Returns the policy that a model's batch norms follow, whatever was asked for.

    Those with `trainable=False` keep to their moving statistics.

    Args:
        model: A model.
        policy: `"support"`, `"transductive"` or `"moving"`.

    Returns:
        `policy`; `"moving"` if no batch norm of the model is trainable; `None` if it has
        none.
    """
    layers = batch_normalizations(model)
    if not layers:
        return None
    return policy if any(layer.trainable for layer in layers) else "moving"


def batch_normalizations(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns the batch norms of a model, those inside other layers included."""
    return [
        layer
        for layer in rewiring.sublayers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]


def last_layer_with_weights(model: keras.Model) -> keras.layers.Layer:
    """Returns the last layer with weights, not itself a model, that a built model calls.

    In a model with a `call` of its own, it is the one that was made last.

    Raises:
        ValueError: If the model has no weights.
    """
    layers = rewiring.layers(model) if rewiring.is_graph(model) else model.layers
    for layer in reversed(layers):
        if isinstance(layer, keras.Model):
            if layer.weights:
                return last_layer_with_weights(layer)
        elif layer.weights:
            return layer
    raise ValueError(f"`model` must have weights. Received: model {model.name!r}")


class FunctionalClassifier:
    """What a built classifier computes with other values in some of its variables.

    All layers run in inference mode (dropout, noise and augmentation are off), except
    that trainable batch norms normalize by the statistics of a batch where asked to.
    Those with `trainable=False` keep to their moving statistics.

    Args:
        model: A built Keras model from images to logits.
        variables: Those of the model's variables that get other values.
        batch_normalization: `"support"`: batch norms normalize the support set by its own
            statistics, and queries by those of the support set; `"transductive"`: each
            batch by its own, the queries included; `"moving"`: all by the moving
            statistics that the model has stored.
        second_order: Whether gradients of gradients may be taken. Without, batch norms
            take a batch's statistics the faster way; with, max poolings are those that
            are differentiated faster.
        logits: Whether the model's outputs must be logits, and not features.

    Attributes:
        model: The model.
        variables: The variables that get other values, in the model's order.
        batch_normalization: The policy.
        normalizations: The model's batch norms, trainable or not.

    Raises:
        ValueError: If the model is not built or ends in a softmax; if a batch norm is
            synchronized, renormalizes, (with `"support"`) is called more than once, or
            (with `"support"` and `"transductive"`) is out of reach, inside a layer or model
            with a `call` of its own.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Collection[keras.Variable] = (),
        batch_normalization: str = "support",
        second_order: bool = True,
        logits: bool = True,
    ) -> None:
        self.second_order = second_order
        if not model.built:
            raise ValueError(
                "`model` must be built. Call it on images, or its `build(input_shape)`, "
                f"first. Received: unbuilt model {model.name!r}"
            )
        self.batch_normalization = validation.one_of(
            batch_normalization, POLICIES, "batch_normalization"
        )
        if logits:
            require_logits(model, "model")
        self.model = model
        chosen = set(map(id, variables))
        self.variables = [each for each in model.variables if id(each) in chosen]
        self.normalizations = batch_normalizations(model)
        self._reached = {
            id(each) for each in self.normalizations if isinstance(each, BatchNormalization)
        }
        self._graph = model
        if rewiring.is_graph(model):
            pools = second_order and any(map(_has_stand_in, rewiring.layers(model)))
            if pools or len(self._reached) < len(self.normalizations):
                self._graph = _with_stand_ins(model, self._reached, pools)
        self._check_normalizations()

    def _check_normalizations(self) -> None:
        for layer in self.normalizations:
            # Older versions of Keras have no batch renormalization.
            if layer.synchronized or getattr(layer, "renorm", False):
                kind = "synchronized" if layer.synchronized else "renorm"
                raise ValueError(
                    "Batch norms of `model` must take the statistics of the episode at "
                    f"hand, so that {kind} must be False. "
                    f"Received: layer {layer.name!r} with {kind}=True"
                )
        if self.batch_normalization != "moving":
            self._require_reach()
        if self.batch_normalization != "support" or not rewiring.is_graph(self.model):
            return
        called = [id(call.layer) for call in rewiring.calls(self.model)]
        for layer in self.normalizations:
            if called.count(id(layer)) > 1:
                raise ValueError(called_twice(layer))

    def _out_of_reach(self) -> list[keras.layers.BatchNormalization]:
        return [layer for layer in self._trainable() if id(layer) not in self._reached]

    def _require_reach(self) -> None:
        for layer in self._out_of_reach():
            raise ValueError(
                "`model` must have its batch norms in its own graph, as a functional or "
                "Sequential model, for them to normalize by the images of an episode; or "
                '`batch_normalization` must be "moving". '
                f"Received: batch_normalization={self.batch_normalization!r}, and layer "
                f"{layer.name!r} inside a layer or model with a `call` of its own"
            )

    @property
    def moving_statistics(self) -> list[Any]:
        """Moving mean and variance of each trainable batch norm, in one flat list."""
        return [
            variable
            for layer in self._trainable()
            for variable in (layer.moving_mean, layer.moving_variance)
        ]

    def _trainable(self) -> list[keras.layers.BatchNormalization]:
        return [layer for layer in self.normalizations if layer.trainable]

    def values(self) -> list[Tensor]:
        """Returns the selected variables' own values."""
        return [ops.convert_to_tensor(variable) for variable in self.variables]

    def outputs(
        self,
        values: Sequence[Tensor],
        images: Tensor,
        statistics: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns logits, and the statistics that batch norms normalized by.

        Args:
            values: Values for `variables`, in their order.
            images: Batch of images.
            statistics: What an earlier call returned, to normalize by; or `None` for
                the statistics of `images` (with `"moving"` the stored ones).

        Returns:
            `(logits, statistics)`: logits of shape `(batch, classes)`, in float32 or
            wider, and mean and variance of each trainable batch norm in one flat list.
        """
        by_batch = statistics is None and self.batch_normalization != "moving"
        if by_batch:
            self._require_reach()  # Flags may have changed since.
        given = zip(self.moving_statistics, statistics, strict=True) if statistics else ()
        return self._run(values, images, list(given), by_batch)

    def query_outputs(
        self, values: Sequence[Tensor], support_images: Tensor, query_images: Tensor
    ) -> Tensor:
        """Returns the logits of queries under the policy, of shape `(queries, classes)`."""
        statistics = None
        if self.batch_normalization == "support" and self._trainable():
            _, statistics = self.outputs(values, support_images)
        return self.outputs(values, query_images, statistics)[0]

    def batch_statistics(self, values: Sequence[Tensor], images: Tensor) -> list[Tensor]:
        """Returns the statistics of a batch under any policy, as `outputs` lists them.

        Batch norms that are out of reach show them in training mode alone. Where there
        are such, the whole model runs in training mode, its dropout included.
        """
        if not self._out_of_reach():
            return self._run(values, images, by_batch=True)[1]
        told = [telling_statistics(layer) for layer in self._trainable()]
        state = [pair for pairs, _ in told for pair in pairs]
        _, moved = self._run(values, images, state, training=True)
        shares = [share for _, share in told for _ in range(2)]
        return [each / max(share, 1e-6) for each, share in zip(moved, shares, strict=True)]

    def update_moving_statistics(
        self, statistics: Sequence[Tensor], examples: Tensor | int
    ) -> None:
        """Moves the stored statistics towards those of a batch, as training does.

        Args:
            statistics: Mean and variance of each trainable batch norm, as `outputs` lists
                them.
            examples: How many images they are of.
        """
        pairs = zip(statistics[::2], statistics[1::2], strict=True)
        for layer, (mean, variance) in zip(self._trainable(), pairs, strict=True):
            move_statistics(layer, mean, variance, examples)

    def _run(
        self,
        values: Sequence[Tensor],
        images: Tensor,
        state: Sequence[tuple[Any, Tensor]] = (),
        by_batch: bool = False,
        training: bool = False,
    ) -> tuple[Tensor, list[Tensor]]:
        # All variables, since a scope around this one ends where the new one begins.
        whole = {
            id(variable): (variable, ops.convert_to_tensor(variable))
            for variable in self.model.variables
        }
        replaced = [*zip(self.variables, values, strict=True), *state]
        whole.update({id(pair[0]): pair for pair in replaced})
        once = self.batch_normalization == "support"
        with (
            keras.StatelessScope(state_mapping=list(whole.values())) as scope,
            normalizing_by_batch(self.second_order, once)
            if by_batch
            else contextlib.nullcontext(),
        ):
            model = self.model if training else self._graph
            logits = model(images, training=training)
            used = [scope.get_current_value(each) for each in self.moving_statistics]
        return at_least_float32(logits), used


class _Calling(keras.Operation):
    """Calls a layer of another graph, and leaves that graph as it is."""

    def __init__(self, layer: keras.Operation) -> None:
        super().__init__(name=layer.name)
        self._layer = layer

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self._layer(*args, **kwargs)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        return self._layer.compute_output_spec(*args, **kwargs)


class _MaxPooling(keras.layers.Layer):
    """Stands for a `MaxPooling2D`, and is differentiated faster."""

    def __init__(self, pooling: keras.layers.MaxPooling2D) -> None:
        super().__init__(name=pooling.name, dtype=pooling.dtype_policy)
        self._pooling = pooling

    def call(self, inputs: Tensor) -> Tensor:
        layer = self._pooling
        return max_pooling(inputs, layer.pool_size, layer.strides, layer.padding)

    def compute_output_spec(self, inputs: Tensor) -> keras.KerasTensor:
        return self._pooling.compute_output_spec(inputs)


def _has_stand_in(layer: keras.Operation) -> bool:
    """Whether a layer is a max pooling that `_MaxPooling` can stand for."""
    return type(layer) is keras.layers.MaxPooling2D and layer.data_format == "channels_last"


def _with_stand_ins(model: keras.Model, reached: set[int], pools: bool) -> keras.Model:
    """Returns a graph that calls a model's layers, and stand-ins for some of them.

    Args:
        model: A functional or Sequential model. It is not changed.
        reached: Takes up the ids of the batch norms that have stand-ins.
        pools: Whether max poolings have stand-ins.
    """

    def stand_in(layer: keras.Operation) -> keras.Operation:
        if rewiring.is_graph(layer):
            return _with_stand_ins(layer, reached, pools)
        if pools and _has_stand_in(layer):
            return _MaxPooling(layer)
        normalizes = isinstance(layer, keras.layers.BatchNormalization)
        if normalizes and not isinstance(layer, BatchNormalization):
            reached.add(id(layer))
            return NormalizationByBatch(layer)
        return _Calling(layer)

    if isinstance(model, keras.Sequential):
        plain = keras.Model(model.inputs[0], model.outputs[0], name=model.name)
    else:
        plain = keras.Model(model.input, model.output, name=model.name)
    return keras.models.clone_model(plain, clone_function=stand_in)
