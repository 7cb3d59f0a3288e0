"""Splits a trained classifier, or regressor, into backbone and head."""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras import graphs, validation
from nsl_keras.copying import copied
from nsl_keras.neighborhoods.cosine import CosineDense
from nsl_keras.nesting import parts_of


def split_classifier(
    model: Any, softmax: bool = True
) -> tuple[keras.Model, keras.layers.Layer]:
    """Returns copies of a model up to its last dense layer, and of that layer, made linear.

    A 1x1 convolution of a 1x1 map, the last layer of `MobileNet`, becomes a dense layer;
    one output `z` with a sigmoid becomes the logits 0 and `z`. A final softmax is dropped,
    or refused if `softmax` is false.
    """
    graphs.require_graph(model)
    copy = copied(model)
    last, after = graphs.ending(copy)
    ends, linear = [last, *after], keras.activations.linear
    passing = (*graphs.PASSING, keras.layers.Softmax)
    activations = [each for each in map(graphs.activation_of, ends) if each is not linear]
    # The sigmoid of a logit z is the softmax of 0 and z.
    is_binary = softmax and activations == [keras.activations.sigmoid]
    is_binary = is_binary and copy.outputs[0].shape[1:] == (1,)
    is_binary = is_binary and not isinstance(last, CosineDense)
    is_linear = is_binary or activations in ([], [keras.activations.softmax] * softmax)
    if not (_is_dense(last) and is_linear and all(type(each) in passing for each in after)):
        names = [each and each.name for each in (last, *reversed(after))]
        raise ValueError(
            "`model` must end in one Dense or CosineDense layer with linear outputs, or a "
            "1x1 convolution of a 1x1 map without a constraint of its kernel; in "
            "classification a softmax may follow, or a sigmoid of one output. Of what "
            "`adapt` returned, pass `keras.Sequential(model.layers[:-1])`. "
            f"Received: model {model.name!r}, which ends in {names}"
        )
    flat = {}
    for each in ends:
        options = {"name": f"instead_of_{each.name}", "dtype": each.dtype_policy}
        flat[id(each)] = keras.layers.Flatten(**options)
    holding = [each for each in parts_of(copy) if graphs.is_graph(each)]
    reached = [each.outputs[0] for each in holding] + [each.input for each in after]
    # A layer's `output` is that of its first call. Sequential models call a layer once.
    is_last = any(each is last.output for each in reached) or any(
        last in each.layers for each in holding if isinstance(each, keras.Sequential)
    )
    rank = 4 if isinstance(last, keras.layers.Conv2D) else 2
    is_vector = len(last.output.shape) == rank and len(model.output_shape) == 2
    demand = (
        "a model of one output, of shape (batch, classes) or (batch, targets), that uses "
        "its last layer once"
    )
    validation.require(is_vector and is_last, "model", demand, model.outputs)
    backbone = graphs.replayed(copy, flat)
    inputs, outputs = graphs.symbols_of(backbone)
    if not isinstance(outputs, keras.KerasTensor):  # One output, in a dict or list.
        backbone = keras.Model(inputs, backbone.outputs[0], name=backbone.name)
    if isinstance(last, keras.layers.Conv2D) or is_binary:
        same = ["use_bias", "kernel_regularizer", "bias_regularizer", "trainable"]
        same += ["kernel_constraint", "bias_constraint", "activity_regularizer"]
        kept = {name: getattr(last, name) for name in same}
        weights = [last.kernel, *([last.bias] if last.use_bias else [])]
        weights = [keras.ops.reshape(each, (-1, each.shape[-1])) for each in weights]
        if is_binary:
            weights = [keras.ops.pad(each, ((0, 0), (1, 0))) for each in weights]
        classes = weights[0].shape[-1]
        head = keras.layers.Dense(classes, dtype=last.dtype_policy, **kept)
        head.build(backbone.output_shape)
        for own, weight in zip(head.weights, weights, strict=True):
            own.assign(keras.ops.reshape(weight, own.shape))
        return backbone, head
    if hasattr(last, "activation"):
        last.activation = linear
    return backbone, last


def _is_dense(layer: Any) -> bool:
    if type(layer) in (keras.layers.Dense, CosineDense):
        return True
    if type(layer) is not keras.layers.Conv2D or layer.kernel_size != (1, 1):
        return False
    shape = list(layer.output.shape)
    del shape[-1 if layer.data_format == "channels_last" else 1]
    # A constraint may count the axes of the kernel.
    return shape[1:] == [1, 1] and layer.groups == 1 and layer.kernel_constraint is None
