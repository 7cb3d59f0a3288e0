"""Names for the classes and functions that an argument takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import keras

_Named = TypeVar("_Named", bound=Callable[..., Any])


class Names(dict[str, Any]):
    """What the names of an argument stand for.

    Args:
        argument: Name of the argument, for messages.
    """

    def __init__(self, argument: str) -> None:
        super().__init__()
        self.argument = argument

    def register(self, name: str) -> Callable[[_Named], _Named]:
        """Returns a decorator that gives a class or function a name.

        Raises:
            ValueError: If the name is taken by another one.
        """

        def decorate(named: _Named) -> _Named:
            taken = self.get(name)
            # A notebook's cell defines its class anew each time it runs.
            if taken is not None and _origin(taken) != _origin(named):
                raise ValueError(
                    f"`name` must not be that of another {self.argument}. Received: "
                    f"name={name!r}, which names {taken.__qualname__}"
                )
            self[name] = named
            return named

        return decorate


class ClassNames(Names):
    """Names of the subclasses of a class, and how they stand in configs.

    Args:
        argument: Name of the argument, for messages.
        base: The class whose instances the argument takes besides names.
        public_name: Its name, for messages.
    """

    def __init__(self, argument: str, base: type, public_name: str) -> None:
        super().__init__(argument)
        self.base = base
        self.public_name = public_name

    def register(self, name: str) -> Callable[[_Named], _Named]:
        give_name = super().register(name)

        def decorate(kind: _Named) -> _Named:
            give_name(kind)
            if keras.saving.get_registered_name(kind) == kind.__name__:
                keras.saving.register_keras_serializable(kind.__module__)(kind)
            return kind

        return decorate

    def instance(self, identifier: Any) -> Any:
        """Returns an instance by name, from a serialized form, or as it is."""
        if isinstance(identifier, self.base):
            return identifier
        if isinstance(identifier, str) and identifier in self:
            return self[identifier]()
        if isinstance(identifier, dict):
            restored = keras.saving.deserialize_keras_object(identifier)
            if isinstance(restored, self.base):
                return restored
        raise ValueError(
            f"`{self.argument}` must be one of {', '.join(map(repr, self))}, or a "
            f"`{self.public_name}`. Received: {self.argument}={identifier!r}"
        )

    def serialize(self, instance: Any) -> Any:
        """Returns an instance as a name, or as Keras serializes objects."""
        for name, kind in self.items():
            if type(instance) is kind and _has_default_arguments(instance):
                return name
        return keras.saving.serialize_keras_object(instance)


def _origin(named: Any) -> tuple[str, str]:
    return named.__module__, named.__qualname__


def _has_default_arguments(instance: Any) -> bool:
    """Whether a config is all defaults of the constructor, so that a name says it."""
    parameters = inspect.signature(type(instance)).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    return bool(instance.get_config() == defaults)
