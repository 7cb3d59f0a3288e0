"""Splits a trained classifier, or regressor, into backbone and head."""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras import graphs
from nsl_keras.copying import copied
from nsl_keras.neighborhoods.cosine import CosineDense
from nsl_keras.nesting import sublayers


def split_classifier(
    model: Any, softmax: bool = True
) -> tuple[keras.Model, keras.layers.Layer]:
    """Returns copies of a model up to its last dense layer, and of that layer.

    The layer's outputs are linear. A 1x1 convolution of a 1x1 map, the last layer of
    `MobileNet`, becomes a dense layer. `softmax` decides whether a final softmax is dropped
    or refused.
    """
    graphs.require_graph(model)
    copy = copied(model)
    last, after = graphs.ending(copy)
    ends = [last, *after]
    dropped = (keras.activations.linear, *[keras.activations.softmax] * softmax)
    if not _is_dense(last) or not all(
        graphs.activation_of(each) in dropped
        and (each is last or type(each) in (*graphs.PASSING, keras.layers.Softmax))
        for each in ends
    ):
        names = [repr(each.name) for each in reversed(ends) if each is not None]
        raise ValueError(
            "`model` must end in one Dense or CosineDense layer with linear outputs, or a "
            "1x1 convolution of a 1x1 map; in classification a softmax may follow, but "
            "not a sigmoid of one output (use a softmax of two outputs). "
            f"Received: model {model.name!r}, which ends in {', '.join(names)}"
        )
    flat = {
        id(each): keras.layers.Flatten(
            name=f"instead_of_{each.name}", dtype=each.dtype_policy
        )
        for each in ends
    }
    is_vector = len(last.output.shape) == (4 if isinstance(last, keras.layers.Conv2D) else 2)
    graphs_on_path = filter(graphs.is_graph, (copy, *sublayers(copy)))
    reached = [graph.outputs[0] for graph in graphs_on_path] + [each.input for each in after]
    # A layer's `output` is that of its first call.
    is_last = any(tensor is last.output for tensor in reached)
    if not is_vector or len(model.output_shape) != 2 or not is_last:
        raise ValueError(
            "`model` must have one output, of shape (batch, classes) or (batch, targets), "
            "and use its last layer once. Received: output shapes "
            f"{[output.shape for output in model.outputs]}, last layer {last.name!r}"
        )
    backbone = graphs.replayed(copy, flat)
    if isinstance(last, keras.layers.Conv2D):
        head = keras.layers.Dense(
            last.filters,
            use_bias=last.use_bias,
            kernel_regularizer=last.kernel_regularizer,
            bias_regularizer=last.bias_regularizer,
            dtype=last.dtype_policy,
            trainable=last.trainable,
        )
        head.build(backbone.output_shape)
        weights = zip(last.get_weights(), head.weights, strict=True)
        head.set_weights([weight.reshape(own.shape) for weight, own in weights])
        return backbone, head
    if hasattr(last, "activation"):
        last.activation = keras.activations.linear
    return backbone, last


def _is_dense(layer: Any) -> bool:
    """Whether a layer is dense, or a 1x1 convolution on a 1x1 map."""
    if type(layer) in (keras.layers.Dense, CosineDense):
        return True
    if type(layer) is not keras.layers.Conv2D or layer.kernel_size != (1, 1):
        return False
    shape = list(layer.output.shape)
    del shape[-1 if layer.data_format == "channels_last" else 1]
    return shape[1:] == [1, 1] and layer.groups == 1
