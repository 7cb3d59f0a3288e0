"""The copy of a model that episodes finetune: its new classifier, and where it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from nsl_keras import rewiring
from nsl_keras.few_shot.functional import last_layer_with_weights
from nsl_keras.training.normalization import from_keras


def copy_with_classifier(
    model: keras.Model, ways: int, new_classifier: bool
) -> tuple[keras.Model, list[Any]]:
    """Returns a copy of a model, and the source of each variable of the copy."""
    classifier = last_layer_with_weights(model)
    new = _new_classifier(classifier, ways) if new_classifier else None
    called = [call.layer for call in rewiring.calls(model)]
    last = called[called.index(classifier) :] if classifier in called else [classifier]

    def replace(layer: keras.layers.Layer) -> list[keras.layers.Layer] | None:
        if new and layer is classifier:
            return new
        if new and layer in last and type(layer) is keras.layers.Reshape:
            # To the new number of outputs.
            return [keras.layers.Flatten(name=layer.name, dtype=layer.dtype_policy)]
        replacement = from_keras(layer)
        return None if replacement is None else [replacement]

    copy = rewiring.rebuild(model, replace)
    if copy.outputs[0].shape[1:] != (ways,):
        raise ValueError(
            "`model` must have `ways` outputs or, with `new_classifier=True`, end in its "
            f"classifier. Received: ways={ways}, and a model with outputs "
            f"of shape {copy.outputs[0].shape}"
        )
    replaced = set(map(id, classifier.variables)) if new_classifier else set()
    sources = [
        own if id(source) in replaced else source
        for own, source in zip(copy.variables, model.variables, strict=True)
    ]
    # Sequential models have no graph to be cut.
    return keras.Model(copy.inputs, copy.outputs[0], name=model.name), sources


def _new_classifier(layer: keras.layers.Layer, ways: int) -> list[keras.layers.Layer]:
    """Returns a new layer in place of a classifier; of a 1x1 convolution, a dense one."""
    config = layer.get_config()
    if type(layer) is keras.layers.Conv2D and layer.kernel_size == (1, 1):
        dtype, activation = layer.dtype_policy, layer.activation
        options = {"use_bias": layer.use_bias, "dtype": dtype, "name": layer.name}
        dense = keras.layers.Dense(ways, activation, **options)
        return [keras.layers.Flatten(dtype=dtype), dense]
    if "units" not in config or not hasattr(layer, "kernel"):
        raise ValueError(
            "`model` must end in a layer with `units` and a kernel, as Dense has, or in a "
            "1x1 convolution, for a new classifier of the episode's ways; or "
            "`new_classifier` must be False. "
            f"Received: layer {layer.name!r} of type {type(layer).__name__!r}"
        )
    return [type(layer).from_config({**config, "units": ways, "trainable": True})]


def cut(
    model: keras.Model, adapted: Sequence[Any]
) -> tuple[keras.Model | None, keras.Model]:
    """Cuts a model where one tensor carries all that the adapted variables see.

    Returns:
        The part before the cut (`None` for nothing), and the part after it.
    """
    chosen = set(map(id, adapted))
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
        except ValueError:  # Another tensor bypasses this one.
            continue
        return keras.Model(model.inputs, tensor), after
    return None, model
