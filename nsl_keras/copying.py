"""Copies of models, by Keras's own files: exact, with all state, and sharing nothing."""

from __future__ import annotations

import contextlib
import inspect
import pathlib
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import keras

from nsl_keras import nesting, validation
from nsl_keras.backend.built_layers import keep_path
from nsl_keras.nesting import parts_of


def copied(model: Any) -> Any:
    """Returns a copy of a built model or layer, not compiled, as from its `.keras` file.

    Functions and classes need not be registered. The copy keeps every `trainable` flag, and
    similarities inside layers whose configs do not contain them, which the file would lose.
    """
    validation.require_built(model, "copy")
    inside = [part for part in parts_of(model) if getattr(part, "is_unsaved", False)]
    hidden = [each for part in inside for each in parts_of(part.bilinear_form)]
    parts = [part for part in parts_of(model) if part not in hidden]
    try:
        with contextlib.ExitStack() as stack:
            for part in inside:
                stack.callback(setattr, part, "__class__", type(part))
                part.__class__ = part.plain
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            path = pathlib.Path(folder) / "model.keras"
            known = stack.enter_context(registered(model))
            # Keras warns of functions that another process could not load.
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            keras.saving.save_model(model, path)
            copy = keras.saving.load_model(path, known, compile=False, safe_mode=False)
        for part, new in zip(parts, parts_of(copy), strict=True):
            if part in inside:
                part.turn_copy(new)
        # Flags of layers before those of variables, which layers pass on.
        both = zip(parts_of(model), parts_of(copy), strict=True)
        pairs = [*both, *paired_variables(model, copy)]
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            "`model` must be one that Keras can save and load, or be changed in place, if "
            "`inplace=True` is possible. The first error says what Keras cannot. Received: "
            f"model {model.name!r}"
        ) from error
    for part, new in pairs:
        keep_path(part, new)  # A loaded Sequential model leaves out its own name.
    nesting.set_flags((new, part.trainable) for part, new in pairs)
    return copy


def paired_variables(model: Any, copy: Any) -> list[tuple[Any, Any]]:
    """Pairs the variables of a model with those of its copy.

    Inside a layer names decide, because quantization adds variables after the layer's own
    ones, but loading puts them first.
    """
    partners: dict[int, Any] = {}
    both = zip(parts_of(model), parts_of(copy), strict=True)
    for part, new in reversed([*both]):  # From the inside.
        taken = {id(each) for each in partners.values()}
        left = [each for each in new.variables if id(each) not in taken]
        own = [each for each in part.variables if id(each) not in partners]
        names = [each.name for each in left]
        if sorted(names) == sorted(each.name for each in own):
            # Pairs of one name are in the same order.
            left.sort(key=lambda each: each.name)
            own.sort(key=lambda each: each.name)
        partners |= {id(each): new for each, new in zip(own, left, strict=True)}
    return [(variable, partners[id(variable)]) for variable in model.variables]


@contextlib.contextmanager
def registered(model: Any) -> Iterator[dict[str, Any]]:
    """Yields classes and functions of a model that Keras would not find, by name.

    In the context every function has a unique name, because Keras finds functions by name
    and would copy the code of a lambda.
    """
    parts = parts_of(model)
    held = [each for part in parts for value in vars(part).values() for each in _in(value)]
    kinds = {type(each) for each in (*parts, *held) if hasattr(each, "get_config")}
    # Keras's own classes are left out: an operation may have the same name.
    known: dict[str, Any] = {
        keras.saving.get_registered_name(kind): kind
        for kind in kinds
        if not _of_keras(kind)
    }
    with contextlib.ExitStack() as stack:
        for function in filter(inspect.isfunction, held):
            if not _of_keras(function) and function.__name__ not in known:
                stack.callback(setattr, function, "__name__", function.__name__)
                function.__name__ = f"function_{len(known)}"
                known[function.__name__] = function
        yield known


def _in(value: Any) -> list[Any]:
    """Returns a layer's attribute and, for an object that is no layer, its attributes."""
    is_object = hasattr(value, "get_config") and not isinstance(value, keras.layers.Layer)
    return [value, *(vars(value).values() if is_object else ())]


def _of_keras(thing: Any) -> bool:
    return str(thing.__module__).partition(".")[0] == "keras"
