"""Changes of a built layer that Keras has no public way for, as its own LoRA makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras


@contextlib.contextmanager
def unlocked(layer: keras.layers.Layer) -> Iterator[None]:
    """Lets a built layer get new weights and sublayers, with paths as if it made them."""
    layer._tracker.unlock()
    try:
        with contextlib.ExitStack() as scopes:
            for name in layer.path.split("/"):
                scopes.enter_context(keras.name_scope(name))
            yield
    finally:
        layer._tracker.lock()


def remove_attribute(layer: keras.layers.Layer, name: str) -> None:
    """Removes an attribute of a built layer, with what Keras tracks of it."""
    with unlocked(layer):
        layer._tracker.untrack(getattr(layer, name))
        delattr(layer, name)


def set_autocast(variable: keras.Variable, autocast: bool) -> None:
    """Decides whether mixed precision reads a variable in half precision."""
    variable._autocast = autocast


def keep_path(
    source: keras.layers.Layer | keras.Variable, copy: keras.layers.Layer | keras.Variable
) -> None:
    """Gives a layer or variable the path of the one that it is a copy of."""
    copy._path = source.path
