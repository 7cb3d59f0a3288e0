"""Objects from their names, or from their serialized arguments."""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras import validation


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
    """Makes an object from its config, in which arguments may be serialized objects."""
    deserialize = keras.saving.deserialize_keras_object
    arguments = {name: deserialize(each, custom_objects) for name, each in config.items()}
    return kind(**arguments)
