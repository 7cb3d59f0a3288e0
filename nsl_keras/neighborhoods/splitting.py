"""Splits a trained classifier, or regressor, into backbone and head."""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras import rewiring
from nsl_keras.neighborhoods.cosine import CosineDense


def split_classifier(
    model: Any, softmax: bool = True
) -> tuple[keras.Model, keras.layers.Layer]:
    """Returns copies of a model up to its last dense layer, and of that layer.

    The layer's outputs are linear. `softmax` decides whether a softmax at the end is
    dropped or refused.
    """
    calls = rewiring.calls(model)
    passing = [keras.activations.linear]
    if softmax:
        passing.append(keras.activations.softmax)
    dropped = []
    while calls and _activation_of(calls[-1].layer) in passing:
        dropped.append(calls.pop().layer)
    last: Any = calls[-1].layer if calls else None
    activation = getattr(last, "activation", keras.activations.linear)
    if type(last) not in (keras.layers.Dense, CosineDense) or activation not in passing:
        name = getattr(activation, "__name__", activation)
        found = "nothing else" if last is None else f"{type(last).__name__} {last.name!r}"
        raise ValueError(
            "`model` must end in a Dense or CosineDense layer with linear outputs; in "
            "classification a softmax may follow. "
            f"Received: model {model.name!r}, which ends in {found}, activation={name!r}"
        )
    dropped.append(last)
    uses = [call.layer for call in calls].count(last)
    if len(model.outputs) != 1 or len(model.output_shape) != 2 or uses != 1:
        raise ValueError(
            "`model` must have one output, of shape (batch, classes) or (batch, targets), "
            "from a last layer that it uses once. Received: output shapes "
            f"{[output.shape for output in model.outputs]}, layer {last.name!r} used "
            f"{uses} times"
        )
    backbone = rewiring.rebuild(
        model, lambda layer: [_identity_for(layer)] if layer in dropped else None
    )
    config = last.get_config()
    if "activation" in config:
        config["activation"] = "linear"
    head = type(last).from_config(config)
    head.build(calls[-1].input_shapes[0])
    head.set_weights(last.get_weights())
    return backbone, head


def _activation_of(layer: Any) -> Any:
    """Returns the activation of a layer without weights; `None` for others."""
    if type(layer) is keras.layers.Softmax and layer.axis in (-1, 1):
        return keras.activations.softmax
    return layer.activation if type(layer) is keras.layers.Activation else None


def _identity_for(layer: keras.layers.Layer) -> keras.layers.Layer:
    """Returns a layer that returns its input in the dtype of `layer`."""
    return keras.layers.Activation(
        "linear", name=f"instead_of_{layer.name}", dtype=layer.dtype_policy
    )
