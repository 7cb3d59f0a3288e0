"""Makes configs from attributes, and objects from configs; functions are not serialized."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import keras

from nsl_keras import validation
from nsl_keras.nesting import sublayers

Layer: TypeAlias = keras.layers.Layer


def with_functions(layer: keras.Operation, config: dict[str, Any]) -> dict[str, Any]:
    """Returns a layer's config without serializing functions, registered or not.

    Objects that hold functions, such as a similarity's initializer, are not serialized.
    """
    own = {name: getattr(layer, name, None) for name in config}
    given = {name: each for name, each in own.items() if any(_functions(each))}
    if hasattr(layer, "output_padding"):  # Keras before 3.11 leaves it out.
        given["output_padding"] = layer.output_padding
    return config | given


def remade(layer: Any, kind: Any = None, config: Any = None, **changes: Any) -> Any:
    """Remakes a layer from its config, without serializing its functions.

    `kind` is the new class; `None` keeps the layer's. Functions of sublayers are found by
    name, so two functions of the same name must be registered.
    """
    parts = [value for part in sublayers(layer) for value in vars(part).values()]
    found = {id(each): each for value in parts for each in _functions(value)}
    names = [each.__name__ for each in found.values()]
    known = {f.__name__: f for f in found.values() if names.count(f.__name__) == 1}
    config = with_functions(layer, layer.get_config() if config is None else config)
    with keras.saving.custom_object_scope(known):
        return (kind or type(layer)).from_config(config | changes)


def _functions(value: Any) -> Iterator[Any]:
    own = {} if isinstance(value, keras.layers.Layer) else getattr(value, "__dict__", {})
    return filter(inspect.isfunction, (value, *own.values()))


def arguments_of(
    layer: Any, kind: type[Any], serialized: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns a class's own arguments, which are attributes of a layer, for its config.

    It leaves out arguments that are already `serialized`.
    """
    left_out = {"self", "args", "kwargs", *serialized}
    serialize = keras.saving.serialize_keras_object
    names = inspect.signature(kind.__init__).parameters
    return {name: serialize(getattr(layer, name)) for name in names if name not in left_out}


def arguments_of_classes(layer: Layer) -> dict[str, Any]:
    """Returns `arguments_of` a layer's classes, up to the first class of this package."""
    found: dict[str, Any] = {}
    for kind in type(layer).__mro__:
        found |= arguments_of(layer, kind, [*found])
        if kind.__module__.startswith("nsl_keras."):
            break
    return found


def named(
    identifier: Any, argument: str, kinds: dict[str, Any], allowed: Any, others: str
) -> Any:
    """Returns an object by its name, from its serialized form, or unchanged."""
    found = identifier
    if isinstance(identifier, str) and identifier in kinds:
        found = kinds[identifier]()
    elif isinstance(identifier, dict):
        found = keras.saving.deserialize_keras_object(identifier)
    demand = f"one of {', '.join(map(repr, kinds))}, {others}"
    validation.require(isinstance(found, allowed), argument, demand, identifier)
    return found


def from_arguments(kind: Any, config: dict[str, Any], custom_objects: Any = None) -> Any:
    """Makes an object from its config, whose arguments may be serialized objects."""
    deserialize = keras.saving.deserialize_keras_object
    return kind(
        **{name: deserialize(each, custom_objects) for name, each in config.items()}
    )
