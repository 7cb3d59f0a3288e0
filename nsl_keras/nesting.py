"""The layers inside a layer: found, frozen with it, and unfrozen for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import keras

Layer: TypeAlias = keras.layers.Layer


def sublayers(layer: Layer) -> Iterator[Layer]:
    """Yields the layers in a layer's attributes, at any depth, each once, outer ones first.

    The order does not depend on when attributes were set.
    """
    return (each for each in values_in(layer) if isinstance(each, keras.layers.Layer))


def values_in(layer: Layer) -> Iterator[Any]:
    """Yields what a layer's attributes contain, at any depth: `sublayers` and all else."""
    seen = {id(layer)}
    waiting: list[Any] = [vars(layer)]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, keras.layers.Layer):
            yield value
            waiting.append(vars(value))
        elif isinstance(value, dict):  # `pop` takes the last one.
            waiting.extend(value[key] for key in sorted(value, key=str, reverse=True))
        elif isinstance(value, (list, tuple, set)):
            waiting.extend(reversed(list(value)))
        else:
            yield value


def parts_of(layer: Layer) -> list[Layer]:
    """Returns a layer and its `sublayers`."""
    return [layer, *sublayers(layer)]


class KeepsFrozen(keras.layers.Layer):
    """Private mixin of layers that make sublayers: saves which of them are frozen.

    Keras saves flags in configs, and these sublayers are in no config.
    """

    def get_build_config(self) -> Any:
        config = super().get_build_config()
        flags = [each.trainable for each in sublayers(self)]
        return config if config is None or all(flags) else {**config, "flags": flags}

    def build_from_config(self, config: dict[str, Any]) -> None:
        config = dict(config)
        flags = config.pop("flags", None)  # Keras keeps the rest as the layer's shapes.
        super().build_from_config(config)
        if flags is not None:
            set_flags(zip(sublayers(self), flags, strict=True))


def set_flags(flags: Iterable[tuple[Any, bool]]) -> None:
    """Sets `trainable` of layers and variables; a layer comes before what it contains."""
    for part, trainable in flags:
        if part.trainable != trainable:
            part.trainable = trainable


def unfreeze_containers(model: Layer, held: Iterable[Layer]) -> None:
    """Unfreezes what contains the layers: loading a frozen container freezes its parts."""
    found = {*held}
    parts = parts_of(model)
    containers = [each for each in parts if not found.isdisjoint(sublayers(each))]
    flags = [(each, each.trainable or each in containers) for each in parts]
    set_flags([*flags, *((each, each.trainable) for each in model.variables)])


def pass_on_frozen(layer: Layer) -> None:
    """Freezes the sublayers that a frozen layer made; call it at the end of `build`.

    Keras itself freezes only the layer's own variables.
    """
    if not layer.trainable:
        for each in sublayers(layer):
            each.trainable = False


def unfreeze(model: Layer) -> None:
    """Makes all layers of a model trainable, at any depth.

    Kernels under a similarity become trainable too; kernels with LoRA stay frozen. Setting
    `trainable` of a model to its present value, in contrast, changes no layer inside.
    Compile the model again afterwards.

    Args:
        model: A model or a layer, of any class.

    Example:

    >>> import nsl_keras
    >>> network = nsl_keras.backbones.convnet4((8, 8, 1))
    >>> model = nsl_keras.convert.add_similarity(network)
    >>> nsl_keras.convert.unfreeze(model)
    >>> len(model.trainable_variables) > 4
    True
    """
    for part in parts_of(model):
        if hasattr(part, "kernel_trainable"):
            part.kernel_trainable = True
        part.trainable = False  # Setting a flag to its present value reaches no variables.
        part.trainable = True
    for part in parts_of(model):
        if getattr(part, "lora_enabled", False):
            # Keras freezes the variable that `lora_<name>_a` belongs to.
            names = {each.name for each in part.variables}
            for variable in part.variables:
                if f"lora_{variable.name}_a" in names:
                    variable.trainable = False


@contextlib.contextmanager
def unfrozen(layer: Layer) -> Iterator[None]:
    """Makes all weights except moving statistics trainable; restores all flags after."""
    parts = parts_of(layer)
    flags = [(each, each.trainable) for each in (*parts, *layer.variables)]
    # First off, because setting a flag to its present value does not reach the variables.
    for value in (False, True):
        for each in parts:
            # Keras's own setter: a layer's own one may keep some variables frozen.
            keras.layers.Layer.trainable.fset(each, value)
    try:
        yield
    finally:
        set_flags(flags)


def forget_functions(model: Any) -> None:
    """Drops what a model, and the models inside it, compiled for their former layers."""
    for part in parts_of(model):
        if isinstance(part, keras.Model):
            part.train_function = part.test_function = part.predict_function = None
        if hasattr(part, "forget_functions"):
            part.forget_functions()


def has_plain_kernel(layer: Layer) -> bool:
    """Whether a layer's kernel, if any, is a float variable: not of LoRA, not quantized."""
    kernel = getattr(layer, "kernel", None)
    return kernel is None or (
        isinstance(kernel, keras.Variable) and keras.backend.is_float_dtype(kernel.dtype)
    )
