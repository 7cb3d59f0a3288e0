"""The copy of a model that episodes finetune: its new classifier, and where it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from nsl_keras import rewiring
from nsl_keras.few_shot.functional import last_layer_with_weights


def copy_with_classifier(
    model: keras.Model, ways: int | None, seed: int
) -> tuple[keras.Model, list[Any]]:
    """Returns a copy of a model, and the variable that each of the copy's is fed from.

    Args:
        model: The model.
        ways: Outputs of a new classifier, or `None` to keep the model's own.
        seed: Seed of the new classifier.
    """
    classifier = last_layer_with_weights(model)
    new = None if ways is None else _new_classifier(classifier, ways, seed)

    def replace(layer: keras.layers.Layer) -> list[keras.layers.Layer] | None:
        return [new] if layer is classifier and new is not None else None

    copy = rewiring.rebuild(model, replace)
    replaced = {id(variable) for variable in classifier.variables} if new else set()
    # A new classifier is trained, whether the old one was frozen or not.
    sources = [
        own if id(source) in replaced else source
        for own, source in zip(copy.variables, model.variables, strict=True)
    ]
    # Sequential models have no graph to be cut.
    return keras.Model(copy.inputs, copy.outputs[0], name=model.name), sources


def _new_classifier(layer: keras.layers.Layer, ways: int, seed: int) -> keras.layers.Layer:
    config = layer.get_config()
    if "units" not in config or not hasattr(layer, "kernel"):
        raise ValueError(
            "`model` must end in a layer with `units` and a kernel, as Dense has them, for "
            "a new classifier of the episode's ways; or `new_classifier` must be False. "
            f"Received: layer {layer.name!r} of type {type(layer).__name__!r}"
        )
    config.update(units=ways, trainable=True)
    for value in config.values():
        if isinstance(value, dict) and "seed" in value.get("config", {}):
            value["config"]["seed"] = seed
    return type(layer).from_config(config)


def require_outputs(model: keras.Model, ways: int) -> None:
    """Raises if a model has not one output for each of the ways."""
    if len(model.output_shape) != 2 or model.output_shape[-1] != ways:
        raise ValueError(
            "`model` must have as many outputs as `ways`, or `new_classifier` be True and "
            f"the classifier be its end. Received: ways={ways}, and a model with outputs "
            f"of shape {model.output_shape}"
        )


def cut(
    model: keras.Model, adapted: Sequence[Any]
) -> tuple[keras.Model | None, keras.Model]:
    """Cuts a model where one tensor carries all that the adapted variables see.

    Returns:
        What lies before the cut (`None` for nothing), and what comes after.
    """
    chosen = {id(variable) for variable in adapted}
    candidates = []
    for layer in model.layers:
        if isinstance(layer.input, keras.KerasTensor):
            candidates.append(layer.input)
        if any(id(variable) in chosen for variable in layer.variables):
            break
    for tensor in reversed(candidates):
        if tensor is model.inputs[0]:
            break
        try:
            after = keras.Model(tensor, model.outputs[0])
        except ValueError:  # Something goes round the tensor.
            continue
        return keras.Model(model.inputs, tensor), after
    return None, model
