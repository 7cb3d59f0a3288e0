"""Copies of a model: one that episodes finetune, cut in two, and one after an episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from nsl_keras import graphs, nesting
from nsl_keras.copying import copied, paired_variables, registered
from nsl_keras.few_shot.functional import (
    FunctionalModel,
    classifier_of,
    effective_policy,
    statistics_of,
)
from nsl_keras.neighborhoods.cosine import CosineDense
from nsl_keras.training.normalization import turn


def copy_with_classifier(
    model: keras.Model, ways: int, new_classifier: bool
) -> tuple[keras.Model, list[Any]]:
    """Returns a copy of a model with `ways` outputs, and the source of each variable.

    The variables of a new classifier are their own sources.
    """
    copy = copied(model)
    sources = {id(new): own for own, new in paired_variables(model, copy)}
    for layer in graphs.layers(copy):
        turn(layer)
    if new_classifier:
        classifier = classifier_of(copy)
        made = graphs.replayed(copy, {id(classifier): _new_classifier(classifier, ways)})
        copy = copied(made)  # Each of its layers has one call, at which it can be cut.
        pairs = paired_variables(made, copy)
        sources = {id(new): sources[id(v)] for v, new in pairs if id(v) in sources}
    if copy.outputs[0].shape[1:] != (ways,):
        raise ValueError(
            "`model` must have `ways` outputs or, with `new_classifier=True`, end in its "
            f"classifier. Received: ways={ways}, and a model with outputs "
            f"of shape {copy.outputs[0].shape}"
        )
    # Sequential models have no graph to be cut.
    made = keras.Model(copy.inputs, copy.outputs[0], name=model.name)
    return made, [sources.get(id(own), own) for own in made.variables]


def _new_classifier(layer: keras.layers.Layer, ways: int) -> keras.layers.Layer:
    is_dense = {"units", "kernel_initializer"} <= layer.get_config().keys()
    if not is_dense or not nesting.has_plain_kernel(layer):
        raise ValueError(
            "`model` must end in a layer with `units` and a kernel, such as Dense, without "
            "LoRA or quantization, so that a new classifier can replace it; or "
            "`new_classifier` must be False. "
            f"Received: layer {layer.name!r} of type {type(layer).__name__!r}"
        )
    start: dict[str, Any] = {}
    if not isinstance(layer, CosineDense):
        start = {"kernel_initializer": "zeros", "bias_initializer": "zeros"}
    changes = {"units": ways, "trainable": True, **start}
    with registered(layer) as known, keras.saving.custom_object_scope(known):
        return type(layer).from_config(layer.get_config() | changes)


def cut(
    model: keras.Model, adapted: Sequence[Any]
) -> tuple[keras.Model | None, keras.Model]:
    """Cuts a model where one tensor carries all that the adapted variables see.

    The part before the cut is `None` if it is empty.
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


def adapted_copy(
    model: keras.Model, policy: str, examples: Any, values: dict[int, Any] | None = None
) -> list[Any]:
    """Returns an input, and a copy that computes what a model computes in an episode.

    Batch norms of the copy normalize by the `policy`, `"support"` (the examples) or
    `"moving"`. `values` are new values of variables, by the variables' ids.
    """
    new = {id(each): each for each in model.variables} | (values or {})
    if effective_policy(model, policy) == "support":
        functional = FunctionalModel(model, model.variables, policy)
        _, found = functional.outputs([*new.values()], examples)
        statistics = statistics_of(functional.trainable_norms())
        new |= zip(map(id, statistics), found, strict=True)
    copy = copied(model)
    for variable, own in paired_variables(model, copy):
        # All of them, because Keras's file merges LoRA's kernels. By NumPy: on JAX, a model
        # that predicts may delete arrays that it shares.
        own.assign(ops.convert_to_numpy(new[id(variable)]))
    shape, dtype = tuple(examples.shape[1:]), None
    if graphs.is_graph(model):
        given = model.inputs[0]
        dtype = given.dtype
        if len(given.shape) == len(shape) + 2:  # As Keras, which adds a last axis of 1.
            shape = (*shape, 1)
    return [keras.Input(shape, dtype=dtype), copy]
