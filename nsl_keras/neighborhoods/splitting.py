"""Splits a trained classifier, or regressor, into backbone and head."""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras import configs, rewiring
from nsl_keras.endings import behavior, ending_of
from nsl_keras.neighborhoods.cosine import CosineDense


def split_classifier(
    model: Any, softmax: bool = True
) -> tuple[keras.Model, keras.layers.Layer]:
    """Returns copies of a model up to its last dense layer, and of that layer.

    The layer's outputs are linear. A 1x1 convolution of a 1x1 map, the last layer of
    `MobileNet`, becomes a dense layer. `softmax` decides whether a final softmax is dropped
    or refused.
    """
    ends, after = ending_of(model)
    last: Any = ends[0].layer if ends else None
    dropped = [call.layer for call in after]
    found = [_behavior_of(call) for call in after]
    if callable(activation := getattr(last, "activation", None)):
        found.append(behavior(activation, ends[0].output_shapes[0]))
    passing = {"identity", "softmax"} if softmax else {"identity"}
    if len(ends) != 1 or not _is_dense(ends[0]) or not passing.issuperset(found):
        names = [repr(call.layer.name) for call in (*ends, *reversed(after))]
        raise ValueError(
            "`model` must end in one Dense or CosineDense layer with linear outputs, or a "
            "1x1 convolution of a 1x1 map; in classification a softmax may follow, but "
            "not a sigmoid of one output (use a softmax of two outputs). "
            f"Received: model {model.name!r}, which ends in {', '.join(names)}"
        )
    dropped.append(last)
    uses = [call.layer for call in rewiring.calls(model)].count(last)
    axes = len(ends[0].output_shapes[0])
    is_vector = axes == (4 if isinstance(last, keras.layers.Conv2D) else 2)
    is_only_output = len(model.outputs) == 1 and len(model.output_shape) == 2
    if not is_vector or not is_only_output or uses != 1:
        raise ValueError(
            "`model` must have one output, of shape (batch, classes) or (batch, targets), "
            "and use its last layer once. Received: output shapes "
            f"{[output.shape for output in model.outputs]}, layer {last.name!r} used "
            f"{uses} times"
        )
    backbone = rewiring.rebuild(
        model, lambda layer: [_passing_on(layer)] if layer in dropped else None
    )
    if isinstance(last, keras.layers.Conv2D):
        head = keras.layers.Dense(
            last.filters,
            use_bias=last.use_bias,
            kernel_regularizer=last.kernel_regularizer,
            bias_regularizer=last.bias_regularizer,
            dtype=last.dtype_policy,
            trainable=last.trainable,
        )
    else:
        linear = {"activation": "linear"} if hasattr(last, "activation") else {}
        head = configs.remade(last, **linear)
    head.build(backbone.output_shape)
    weights = zip(last.get_weights(), head.weights, strict=True)
    head.set_weights([weight.reshape(own.shape) for weight, own in weights])
    return backbone, head


def _is_dense(call: rewiring.Call) -> bool:
    """Whether a call runs a dense layer, or a 1x1 convolution on a 1x1 map."""
    layer: Any = call.layer
    if type(layer) in (keras.layers.Dense, CosineDense):
        return True
    if type(layer) is not keras.layers.Conv2D or layer.kernel_size != (1, 1):
        return False
    shape = list(call.output_shapes[0])
    del shape[-1 if layer.data_format == "channels_last" else 1]
    return shape[1:] == [1, 1] and layer.groups == 1


def _behavior_of(call: rewiring.Call) -> str:
    """Returns the `behavior` of a layer without weights, which can be replaced."""
    if len(call.inputs) != 1 or not isinstance(call.layer, keras.layers.Layer):
        return "other"
    return behavior(call.on, call.input_shapes[0])


def _passing_on(layer: Any) -> keras.layers.Layer:
    """Returns a layer that returns its input, flat, in the dtype of `layer`."""
    return keras.layers.Flatten(name=f"instead_of_{layer.name}", dtype=layer.dtype_policy)
