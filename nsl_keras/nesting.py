"""The layers in a layer's attributes: found, frozen with it, and unfrozen for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, TypeAlias

import keras

Layer: TypeAlias = keras.layers.Layer


def sublayers(layer: Layer) -> Iterator[Layer]:
    """Yields the layers in a layer's attributes, at any depth, each once and in order."""
    seen = {id(layer)}
    waiting: list[Any] = [vars(layer)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, keras.layers.Layer):
            if id(value) not in seen:
                seen.add(id(value))
                yield value
                waiting.append(vars(value))
        elif isinstance(value, dict):
            waiting.extend(reversed(value.values()))  # `pop` takes the last one.
        elif isinstance(value, (list, tuple, set)):
            waiting.extend(reversed(list(value)))


class KeepsFrozen(keras.layers.Layer):
    """Private mixin of layers that make sublayers: saves which sublayers are frozen.

    Keras saves flags in configs, but these sublayers are in no config.
    """

    def get_build_config(self) -> Any:
        config = super().get_build_config()
        return config and {**config, "frozen": [*_frozen_parts(self)]}

    def build_from_config(self, config: dict[str, Any]) -> None:
        config = dict(config)
        frozen = config.pop("frozen", ())  # Keras keeps the rest as the layer's shapes.
        super().build_from_config(config)
        for path in frozen:
            attrgetter(path)(self).trainable = False


def _frozen_parts(layer: Layer, prefix: str = "") -> Iterator[str]:
    """Yields the attributes of a layer, and of theirs, that are frozen layers."""
    for name, part in vars(layer).items():
        if isinstance(part, keras.layers.Layer) and not name.startswith("_"):
            own = [] if part.trainable else [prefix + name]
            yield from own or _frozen_parts(part, f"{prefix}{name}.")


def pass_on_frozen(layer: Layer) -> None:
    """Freezes the sublayers that a frozen layer made; call it at the end of `build`.

    Keras itself freezes only the layer's own variables.
    """
    if not layer.trainable:
        for each in sublayers(layer):
            each.trainable = False


@contextlib.contextmanager
def unfrozen(layer: Layer) -> Iterator[None]:
    """Makes a whole layer trainable inside the context, and restores each flag after it.

    In the context `trainable_variables` are all weights except moving statistics.
    """
    # Parts after what holds them, which passes its flag on by their own setters.
    parts = [layer, *sublayers(layer)]
    parts.sort(key=lambda each: len([*sublayers(each)]), reverse=True)
    layers = [(each, each.trainable) for each in parts]
    variables = [(each, each.trainable) for each in layer.variables]
    # Off first: setting a flag to its present value does not reach the variables.
    for value in (False, True):
        for each, _ in layers:
            # Keras's own setter: a layer's own one may keep some variables frozen.
            keras.layers.Layer.trainable.fset(each, value)
    try:
        yield
    finally:
        for flagged in (layers, variables):  # A layer also sets its variables' flags.
            for each, trainable in flagged:
                if each.trainable != trainable:
                    each.trainable = trainable
