"""The end of a model: its last layers with weights, and what follows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import rewiring
from nsl_keras.backend import outside_traces


def ending_of(model: keras.Model) -> tuple[list[rewiring.Call], list[rewiring.Call]]:
    """Returns the last calls with weights on each path to the outputs, and later calls.

    Both lists begin with the call nearest to the outputs. `model` is not subclassed.
    """
    calls, waiting = rewiring.traced(model)
    makers = {id(tensor): call for call in calls for tensor in call.outputs}
    last: dict[int, rewiring.Call] = {}
    after: dict[int, rewiring.Call] = {}
    while waiting:
        call = makers.get(id(waiting.pop(0)))
        if call is None:  # An input of the model.
            continue
        if getattr(call.layer, "weights", ()):
            last.setdefault(id(call.layer), call)
        elif id(call) not in after:
            after[id(call)] = call
            waiting.extend(call.inputs)
    return list(last.values()), list(after.values())


def behavior(function: Callable[[Any], Any], shape: Sequence[int | None]) -> str:
    """Returns what a function without weights does to random numbers of a shape.

    `"identity"` up to the shape, `"linear"`, `"softmax"` or `"other"`.
    """
    rng = np.random.default_rng(0)
    size = [2 if each is None else each for each in shape]
    one, other = rng.normal(size=(2, *size)).astype("float32")
    with outside_traces():
        first, second, both = (
            ops.convert_to_numpy(ops.cast(function(ops.convert_to_tensor(x)), "float32"))
            for x in (one, other, one + other)
        )
    exponentials = np.exp(one.reshape(size[0], -1))
    expected = {
        "identity": (first, one),
        "linear": (first + second, both),
        "softmax": (first, exponentials / exponentials.sum(axis=1, keepdims=True)),
    }
    for name, (received, wanted) in expected.items():
        # Layers may compute in half precision.
        if received.size == wanted.size and np.allclose(
            received.ravel(), wanted.ravel(), rtol=0.02, atol=0.02
        ):
            return name
    return "other"


def require_linear(model: keras.layers.Layer, argument: str) -> None:
    """Raises unless a model has one output, linear in what its last weights compute.

    A subclassed model passes, because it does not show its layers.
    """
    if rewiring.is_graph(model):
        if len(model.outputs) != 1:
            raise ValueError(
                f"`{argument}` must have one output, the logits. Received: "
                f"{argument}={model.name!r} with {len(model.outputs)} outputs"
            )
        last, after = ending_of(model)
        ends = [(call.layer, call.output_shapes[0]) for call in last]
    else:
        after, ends = [], [(model, (2, 5))]
    steps = [
        (call.layer, call.on, call.input_shapes[0])
        for call in after
        if len(call.inputs) == 1
    ]
    steps += [
        (layer, layer.activation, shape)
        for layer, shape in ends
        if callable(getattr(layer, "activation", None))
    ]
    for layer, function, shape in steps:
        if behavior(function, shape) not in ("identity", "linear"):
            raise ValueError(
                f"`{argument}` must return logits: its last layer must be linear, and so "
                "must be what follows it, without a softmax, sigmoid or ReLU. Received: "
                f"{argument}={model.name!r}, whose outputs pass through {layer.name!r}"
            )
