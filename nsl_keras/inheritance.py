"""Layers that stand on Keras's own: how help shows the arguments of both."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import keras

#: Arguments of Keras's layers that are refused, or have nothing to act on here.
_LEFT_OUT = (
    "lora_rank",
    "lora_alpha",
    "quantization_config",
    "renorm",
    "renorm_clipping",
    "renorm_momentum",
)


def _signature(layer: type) -> inspect.Signature:
    """Returns the arguments of Keras's class, followed by those that ours adds."""
    own: dict[str, inspect.Parameter] = {}
    for each in layer.__mro__:
        if "__init__" not in vars(each):
            continue
        _, *parameters = inspect.signature(vars(each)["__init__"]).parameters.values()
        if not any(each.kind is each.VAR_POSITIONAL for each in parameters):
            break
        added = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
        own = {**added, **own}
    keras_parameters = {each.name: each for each in parameters}
    options = [each for each in parameters if each.kind is each.VAR_KEYWORD]
    inherited = [
        each.replace(default=own[name].default) if name in own else each
        for name, each in keras_parameters.items()
        if each not in options and name not in _LEFT_OUT
    ]
    added_last = [each for name, each in own.items() if name not in keras_parameters]
    return inspect.Signature([*inherited, *added_last, *options])


class StandsOnKeras(keras.layers.Layer):
    """Private mixin, in front of a Keras layer: help shows the arguments of both."""

    #: The Keras layer that this one stands on.
    plain: ClassVar[type[keras.layers.Layer]]
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = (each for each in cls.__mro__ if not issubclass(each, StandsOnKeras))
        cls.plain = next(bases)
        cls.__signature__ = _signature(cls)
