"""Examples in any form that Keras's `predict` takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from nsl_keras import validation


class BatchFunction(keras.Model):
    """Private: a function of batches as a model, whose `predict` takes any data."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        model: keras.layers.Layer,
        run_eagerly: bool = False,
    ) -> None:
        # Inputs reach the model as they are; paths of weights begin with its name. With a
        # mixed policy Keras would round the variables that the function reads.
        super().__init__(autocast=False, name=model.name, dtype=model.variable_dtype)
        self.function = function
        self.model = model
        self.built = True
        self.compile(run_eagerly=run_eagerly)

    def call(self, inputs: Any) -> Any:
        return self.function(inputs)

    def predict(self, x: Any, *args: Any, **options: Any) -> Any:
        if is_in_memory(x):
            x, _ = gather(x)
            has_axes = all(map(np.ndim, leaves(x)))
            validation.require(has_axes, "x", "a batch, not a scalar", x)
        return super().predict(as_inputs(x), *args, **{"verbose": 0, **options})


def predict(
    function: Callable[[Any], Any], model: keras.layers.Layer, x: Any, **options: Any
) -> Any:
    """Maps a function of a model's weights over batches, eagerly; returns NumPy arrays."""
    return BatchFunction(function, model, run_eagerly=True).predict(x, **options)


def leaves(x: Any) -> list[Any]:
    """Returns the arrays of a structure, without `None`, an optional input left out."""
    return [leaf for leaf in tree.flatten(x) if leaf is not None]


def is_in_memory(x: Any) -> bool:
    """Whether `x` is a dense array or a structure of arrays: no data set, no generator."""
    found = leaves(x)
    return bool(found) and all(
        hasattr(leaf, "__array__") or np.isscalar(leaf) for leaf in found
    )


def array_of(values: Any) -> np.ndarray:
    """Returns a NumPy array; TensorFlow's strings, which are bytes, become Keras's text."""
    array = np.asarray(values)
    if array.dtype == object and array.size and isinstance(array.flat[0], bytes):
        return np.char.decode(array.astype(bytes), "utf-8").astype(object)
    return array


def with_text(array: Any) -> Any:
    """Returns text as a tensor, since Keras's models take no strings of NumPy."""
    is_text = np.asarray(array).dtype.kind in "OSU"
    return ops.convert_to_tensor(array, "string") if is_text else array


def as_inputs(x: Any) -> Any:
    """Returns examples with text as tensors; data sets as they are."""
    return map_arrays(with_text, x) if is_in_memory(x) else x


def map_arrays(function: Callable[..., Any], *structures: Any) -> Any:
    """`keras.tree.map_structure` that keeps `None`, an input that is left out."""
    return tree.map_structure(
        lambda *leaves: None if leaves[0] is None else function(*leaves), *structures
    )


def gather(x: Any, y: Any = None) -> tuple[Any, Any]:
    """Returns all examples and their targets, or `None`, as NumPy arrays.

    `x` is an array, a structure of arrays, or a finite iterable of batches `x` or `(x, y)`.
    """
    if is_in_memory(x):
        of_numbers = all(map(np.isscalar, tree.flatten(x)))  # Nested lists, for example.
        x = array_of(x) if of_numbers else map_arrays(array_of, x)
        return x, None if y is None else array_of(y)
    _require_dense(x)
    demand = "None if `x` is a data set, which yields its own targets"
    validation.require(y is None, "y", demand, type(y))
    batches = [keras.utils.unpack_x_y_sample_weight(batch)[:2] for batch in x]
    _require_dense(batches[:1])
    sound = batches and all(map(np.ndim, leaves(batches[0])))
    demand = "batches, as `dataset.batch(32)` yields: not empty or without a batch axis"
    validation.require(sound, "x", demand, type(x))
    x, y = map_arrays(
        lambda *leaves: array_of(np.concatenate([*map(ops.convert_to_numpy, leaves)])),
        *batches,
    )
    return x, y


def _require_dense(x: Any) -> None:
    for leaf in leaves(x):
        dense = hasattr(leaf, "__array__") or not ops.is_tensor(leaf)
        validation.require(dense, "x", "dense", type(leaf))
