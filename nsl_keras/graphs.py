"""Functional and Sequential models as graphs: their layers, their end, and replays.

Types alone tell the end of a model, because samples do not tell what a function computes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
from keras import tree

from nsl_keras import validation

Layer: TypeAlias = keras.layers.Layer

#: Layers that pass on the values of a vector of outputs in inference.
PASSING = (
    keras.layers.Activation,
    keras.layers.Dropout,
    keras.layers.Flatten,
    keras.layers.Identity,
    keras.layers.Reshape,
)


@functools.cache
def _own_calls() -> tuple[Any, Any]:
    # Named, or the names that Keras counts up for the user's layers would skip a number.
    inputs = keras.Input((1,), name="inputs")
    outputs = keras.layers.Identity(name="outputs")(inputs)
    functional = keras.Model(inputs, outputs, name="functional")
    return keras.Sequential.call, type(functional).call


def is_graph(layer: Any) -> bool:
    """Whether a layer is a functional or Sequential model with Keras's own `call`."""
    return isinstance(layer, keras.Model) and type(layer).call in _own_calls()


def require_graph(model: Any) -> None:
    """Raises unless `model` is a built functional or Sequential model."""
    demand = (
        "a functional or Sequential model of Keras 3, and built: start it with a "
        "`keras.Input`, or call it on data"
    )
    validation.require(is_graph(model) and hasattr(model, "inputs"), "model", demand, model)


def root_of(model: Any) -> keras.Model:
    """Returns what conversions change: a model, or the backbone of one with neighbors."""
    root = getattr(model, "converted_part", model)
    is_built = isinstance(root, keras.Model) and root.built
    demand = "a built model of Keras 3: start it with a `keras.Input`, or call it on data"
    validation.require(is_built, "model", demand, root)
    return root


def graph_of(model: Any) -> keras.Model:
    """Returns `root_of` a model, which must be a functional or Sequential model."""
    root = getattr(model, "converted_part", model)
    require_graph(root)
    return root


def symbols_of(model: Any) -> tuple[Any, Any]:
    """Returns the symbolic inputs and outputs of a graph, in the model's structure."""
    if isinstance(model, keras.Sequential):
        return model.inputs[0], model.outputs[0]
    return model.input, model.output


def output_spec(model: Layer, inputs: Any) -> Any:
    """Returns a model's symbolic outputs.

    Functional models know them already, and accept inputs that omit a trailing axis of size
    1, but a symbolic call with such inputs fails.
    """
    outputs = getattr(model, "outputs", None)
    if outputs and len(outputs) == 1 and None not in outputs[0].shape[1:]:
        batch = tree.flatten(inputs)[0].shape[0]
        return keras.KerasTensor((batch, *outputs[0].shape[1:]), outputs[0].dtype)
    return model(inputs)


def layers(model: keras.Model, is_open: Callable[[Any], bool] = is_graph) -> list[Layer]:
    """Returns the layers of a graph and of the graphs inside it, each once.

    `keras.layers.TimeDistributed` is replaced by the layer inside it. `is_open` decides
    whether a layer counts as a graph.
    """
    found: dict[int, Layer] = {}
    for each in model.layers if is_open(model) else ():
        layer = each.layer if type(each) is keras.layers.TimeDistributed else each
        if is_open(layer):
            found |= {id(inner): inner for inner in layers(layer, is_open)}
        elif not isinstance(layer, keras.layers.InputLayer):
            found[id(layer)] = layer
    return list(found.values())


def saves_layers(layer: Any) -> bool:
    """Whether a layer is a graph whose config contains the configs of its layers.

    Subclasses with their own constructor save its arguments instead.
    """
    if not is_graph(layer):
        return False
    with contextlib.suppress(NotImplementedError, TypeError, ValueError):
        return isinstance(layer.get_config().get("layers"), list)
    return False


def replayed(model: keras.Model, replacements: dict[int, Layer]) -> keras.Model:
    """Returns a model on the same inputs; `replacements` maps ids of layers to new layers.

    Do this to a copy, because the layers get calls that belong to no other model.
    """

    @functools.cache
    def new(layer: Any) -> Any:
        if id(layer) in replacements:
            return replacements[id(layer)]
        inner = getattr(layer, "layer", None)
        if type(layer) is keras.layers.TimeDistributed and new(inner) is not inner:
            return keras.layers.TimeDistributed(new(inner), name=layer.name)
        holds = is_graph(layer) and any(id(each) in replacements for each in layers(layer))
        return replayed(layer, replacements) if holds else layer

    def call(layer: Any, *tensors: Any, **options: Any) -> Any:
        # The options were those of the layer that is replaced.
        return layer(*tensors, **({} if layer in replacements.values() else options))

    if isinstance(model, keras.Sequential):
        return type(model)([model.inputs[0], *map(new, model.layers)], name=model.name)
    return keras.models.clone_model(model, model.input, new, call)


def ending(model: keras.Model) -> tuple[Any, list[Any]]:
    """Returns the last layer with weights on the path to the only output, and later ones.

    The first is `None` if the model has several outputs, or a later operation joins several
    tensors. Later layers are listed from the output back.
    """
    after: list[Any] = []
    if len(model.outputs) != 1:
        return None, after
    # Operations are ordered by their distance to the output, so the one before an operation
    # with a single input makes this input.
    for operation in reversed(getattr(model, "operations", model.layers)):
        if is_graph(operation) and operation.weights:
            last, inside = ending(operation)
            return last, [*after, *inside]
        if getattr(operation, "weights", ()) and not hasattr(operation, "only_scales"):
            return operation, after
        after.append(operation)
        if len(tree.flatten(operation.input)) != 1:
            break
    return None, after


def classifier_of(model: keras.Model) -> Layer:
    """Returns the last layer with weights of a functional or Sequential model."""
    layer = ending(model)[0] if is_graph(model) else None
    is_known = layer is not None and not isinstance(layer, keras.Model)
    demand = (
        "functional or Sequential and end in one layer with weights, its classifier; or "
        "select variables by their names"
    )
    validation.require(is_known, "model", demand, model.name)
    return layer


def activation_of(layer: Any) -> Any:
    """Returns a layer's activation as a function, linear by default."""
    if type(layer) is keras.layers.Softmax:
        return keras.activations.softmax if layer.axis == -1 else None
    return getattr(layer, "activation", None) or keras.activations.linear


def require_linear(model: Layer, argument: str) -> None:
    """Raises unless a model has one output, linear in what its last weights compute.

    Subclassed models pass, because they do not show their layers.
    """
    ends = [model]
    if is_graph(model):
        demand = "a model with one output, logits of shape (batch, classes)"
        fits = len(model.outputs) == 1 and len(model.outputs[0].shape) == 2
        validation.require(fits, argument, demand, model.outputs)
        last, after = ending(model)
        ends = [*after, last]
    passing = (*PASSING, keras.layers.InputLayer, keras.layers.Rescaling)
    for layer in ends:
        passes = layer is ends[-1] or type(layer) in passing
        if not passes or activation_of(layer) is not keras.activations.linear:
            raise ValueError(
                f"`{argument}` must return logits: its last layer must be linear, and so "
                "must be what follows it, without a softmax, sigmoid or ReLU. (To features "
                "append `keras.layers.Dense(classes)`.) Received: "
                f"{argument}={model.name!r}, whose outputs pass through {layer.name!r}"
            )
