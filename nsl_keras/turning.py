"""Turns a built Keras layer into one of this package, in place, and back.

The layer stays the same object with the same variables, so graphs, nested models, names and
paths do not change. Conversions turn layers of a copy, or of the model itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import keras

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.backend.built_layers import remove_attribute, unlocked
from nsl_keras.copying import copied


@contextlib.contextmanager
def turned_into(layer: Any, kind: type[keras.layers.Layer]) -> Iterator[Any]:
    """Turns a built layer into a derived class and yields the input shape it was built for.

    In the context add the parts of the class. `kind.call` must have the signature of the
    layer's `call`, which Keras has read already.
    """
    layer.__class__ = kind
    with unlocked(layer):
        yield layer.get_build_config()["input_shape"]


class Foldable(keras.layers.Layer):
    """Private mixin of layers that equal a Keras layer, `plain`, with other weights."""

    plain: ClassVar[type[keras.layers.Layer]]
    #: The attributes that the plain layer does not have.
    own_attributes: ClassVar[tuple[str, ...]] = ()

    @property
    def has_plain_twin(self) -> bool:
        """Whether the layer computes as the plain one does, and is of no derived class."""
        return "plain" in vars(type(self))

    def folded_variables(self) -> list[tuple[keras.Variable, Tensor]]:
        """Returns variables that differ in the plain layer, with their values there."""
        return []

    def fold(self) -> keras.layers.Layer:
        """Returns a new plain Keras layer that computes the same, with weights of its own.

        Raises:
            ValueError: If the layer is not built, or has no plain equivalent: derived
                classes have none, because they may compute something else.
        """
        if not self.has_plain_twin:
            kind, plain = type(self).__name__, self.plain.__name__
            raise ValueError(f"`fold` needs a layer that computes as {plain}, not a {kind}")
        validation.require_built(self, "fold")
        copy: Any = copied(self)
        copy.fold_inplace()
        return copy

    def become_plain(self) -> None:
        """Drops what the class adds, even from a layer that an error left half turned."""
        for name in vars(self).keys() & {*self.own_attributes}:
            remove_attribute(self, name)
        self.__class__ = self.plain

    def fold_inplace(self) -> None:
        """Turns the layer, in place, into the plain layer that computes the same."""
        values = self.folded_variables()
        self.become_plain()
        for variable, value in values:
            variable.assign(value)
