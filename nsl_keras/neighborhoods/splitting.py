"""A trained classifier, or regressor, as backbone and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from nsl_keras import rewiring
from nsl_keras.neighborhoods.cosine import CosineDense


def split_classifier(
    model: Any, softmax: bool = True
) -> tuple[keras.Model, keras.layers.Layer]:
    """Splits a model at its last dense layer, with copies of its weights.

    Args:
        model: Functional or Sequential model that ends in `Dense` or `CosineDense`.
        softmax: bool, whether a softmax after that is left out, and not refused.

    Returns:
        `(backbone, head)`: the model up to the layer, which a linear
        activation replaces; and the layer, whose outputs are linear.

    Raises:
        ValueError: If the model is subclassed, not built, has several outputs, or does not
            end in a dense layer of one output a class or target.
    """
    passing = [keras.activations.linear]
    if softmax:
        passing.append(keras.activations.softmax)
    rewiring.require_graph(model)
    if len(model.outputs) != 1:
        raise ValueError(
            f"`model` must have one output. Received: {len(model.outputs)} outputs"
        )
    if len(model.output_shape) != 2:
        raise ValueError(
            "`model` must have outputs of shape (batch, classes) or (batch, targets). "
            f"Received: output shape {model.output_shape}"
        )
    calls = rewiring.calls(model)
    replaced = []
    while calls and _passes(calls[-1].layer, passing):
        replaced.append(calls.pop().layer)
    last: Any = calls[-1].layer if calls else None
    if type(last) not in (keras.layers.Dense, CosineDense):
        found = "nothing else" if last is None else f"{type(last).__name__} {last.name!r}"
        raise ValueError(
            "`model` must end in a Dense or CosineDense layer; a softmax layer may follow "
            "in classification. "
            f"Received: model {model.name!r}, which ends in {found}"
        )
    activation = getattr(last, "activation", keras.activations.linear)
    if activation not in passing:
        raise ValueError(
            "`model` must end in logits or in a softmax over at least two classes, or for "
            "a regression in a linear layer. Received: layer "
            f"{last.name!r} with activation={getattr(activation, '__name__', activation)!r}"
        )
    replaced.append(last)
    if any(call.layer in replaced for call in calls[:-1]):
        raise ValueError(
            "`model` must use its last layer once. Received: layer "
            f"{last.name!r}, which is called more than once"
        )
    backbone = rewiring.rebuild(
        model,
        lambda layer: [_identity_for(layer)] if layer in replaced else None,
    )
    config = last.get_config()
    if "activation" in config:
        config["activation"] = "linear"
    head = type(last).from_config(config)
    head.build(calls[-1].input_shapes[0])
    head.set_weights(last.get_weights())
    return backbone, head


def _identity_for(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Passes on what the layer received, in the layer's dtype."""
    return keras.layers.Activation(
        "linear", name=f"instead_of_{layer.name}", dtype=layer.dtype_policy
    )


def _passes(layer: Any, passing: Sequence[Any]) -> bool:
    """Whether a layer computes no more than one of the activations, over classes."""
    if type(layer) is keras.layers.Softmax:
        return keras.activations.softmax in passing and layer.axis in (-1, 1)
    return type(layer) is keras.layers.Activation and layer.activation in passing
