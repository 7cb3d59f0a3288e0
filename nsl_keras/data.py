"""Examples in any form that `predict` takes: arrays, structures of them, data sets.

One rule: a list, tuple or dict of arrays is one input each, as in Keras; whatever else can
be iterated over yields batches `x`, `(x, y)` or `(x, y, sample_weight)`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from nsl_keras import validation
from nsl_keras.progress import Progress

#: Examples computed at once where nobody says how many.
BATCH_SIZE = 128


def is_array(data: Any) -> bool:
    """Whether `data` is an array, a tensor or a table of pandas, and no data set."""
    return hasattr(data, "__array__") or ops.is_tensor(data)


def is_in_memory(x: Any) -> bool:
    """Whether `x` is an array or a structure of arrays, and no data set."""
    if is_array(x):
        return True
    if not isinstance(x, (list, tuple, dict)):
        return False
    leaves = tree.flatten(x)
    # Numbers in a list are an array in the making.
    return bool(leaves) and all(is_array(leaf) or np.isscalar(leaf) for leaf in leaves)


def arrays_of(x: Any) -> Any:
    """Returns NumPy arrays in the structure of `x`, which is in memory."""
    if isinstance(x, (list, tuple)) and not any(map(_holds_arrays, x)):
        return np.asarray(x)
    return tree.map_structure(
        lambda leaf: (
            ops.convert_to_numpy(leaf) if ops.is_tensor(leaf) else np.asarray(leaf)
        ),
        x,
    )


def _holds_arrays(x: Any) -> bool:
    return any(hasattr(leaf, "__array__") and np.ndim(leaf) for leaf in tree.flatten(x))


def length_of(x: Any) -> int:
    """Returns the number of examples in a structure of arrays.

    Raises:
        ValueError: If the arrays have different lengths, or there are none.
    """
    lengths = [len(leaf) if np.ndim(leaf) else 0 for leaf in tree.flatten(x)]
    if not lengths or len(set(lengths)) != 1:
        raise ValueError(
            "`x` must be arrays of the same length. Received: x with arrays of lengths "
            f"{lengths}"
        )
    return lengths[0]


def take(x: Any, chosen: Any) -> Any:
    """Returns the examples at some places of a structure of arrays."""
    return tree.map_structure(lambda leaf: leaf[chosen], x)


def as_tensors(x: Any) -> Any:
    """Returns tensors in the structure of `x`."""
    return tree.map_structure(ops.convert_to_tensor, x)


def batches(
    x: Any,
    batch_size: int | None = None,
    steps: int | None = None,
    verbose: Any = 0,
) -> Iterator[tuple[Any, Any]]:
    """Yields batches `(x, y)` of arrays; `y` is `None` where the data have no targets.

    Args:
        x: Array, structure of arrays, `tf.data.Dataset`, `keras.utils.PyDataset`,
            generator, or any other iterable of batches.
        batch_size: int or `None`, the size of batches of arrays; data sets come in their
            own.
        steps: int or `None`, the number of batches to take; `None` is all of them.
        verbose: Progress: `"auto"`, 0, 1 or 2, see `nsl_keras.progress.Progress`.

    Raises:
        ValueError: For data of another kind, without an example, or a data set that says
            that it has no end, without `steps`. A generator does not say so.
    """
    batch_size = validation.optional(validation.positive_integer, batch_size, "batch_size")
    steps = validation.optional(validation.positive_integer, steps, "steps")
    count, found = _source(x, batch_size or BATCH_SIZE, steps is not None)
    if steps is not None:
        count = steps if count is None else min(count, steps)
        found = itertools.islice(found, steps)
    progress = Progress(count, verbose)
    empty = True
    for batch in progress.over(found):
        empty = False
        yield batch
    if empty:
        raise ValueError(
            "`x` must hold at least one example. Received: x of type "
            f"{type(x).__name__} without any"
        )


def _source(
    x: Any, batch_size: int, has_end: bool
) -> tuple[int | None, Iterator[tuple[Any, Any]]]:
    """The number of batches, where it is known, and the batches."""
    if is_in_memory(x):
        arrays = arrays_of(x)
        total = length_of(arrays)
        starts = range(0, total, batch_size)
        return len(starts), (
            (take(arrays, slice(start, start + batch_size)), None) for start in starts
        )
    # Older versions of Keras cannot iterate over their own data sets.
    has_batches = hasattr(x, "__iter__") or isinstance(x, keras.utils.PyDataset)
    if not has_batches or isinstance(x, (str, bytes)):
        raise ValueError(
            "`x` must be an array, a list, tuple or dict of arrays, a data set or a "
            f"generator of batches. Received: x of type {type(x).__name__}"
        )
    count = known_length(x)
    if count == math.inf and not has_end:
        raise ValueError(
            "`x` must end, as a data set does after `take(n)`, or `steps` say how many "
            f"batches to take. Received: an endless {type(x).__name__}"
        )
    number = None if count == math.inf else count
    if isinstance(x, keras.utils.PyDataset):
        indices = itertools.count() if number is None else range(number)
        return number, (_unpacked(x[index]) for index in indices)
    return number, map(_unpacked, x)


def known_length(x: Any) -> Any:
    """The number of elements of a data set, which may be infinite; `None` if unknown."""
    if isinstance(x, keras.utils.PyDataset):
        return math.inf if x.num_batches is None else x.num_batches
    if hasattr(x, "cardinality"):  # A `tf.data.Dataset`: -1 is infinite, -2 unknown.
        count = int(x.cardinality())
        return {-1: math.inf, -2: None}.get(count, count)
    return len(x) if hasattr(x, "__len__") else None


def _unpacked(batch: Any) -> tuple[Any, Any]:
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return arrays_of(x), None if y is None else arrays_of(y)


def gathered(x: Any, y: Any = None, steps: int | None = None) -> tuple[Any, Any]:
    """Returns all examples, and their targets, as arrays.

    Args:
        x: Examples, in any form of `batches`.
        y: Array of their targets; `None` where there are none, or a data set has them.
        steps: int or `None`, the number of batches to take of a data set.

    Raises:
        ValueError: As `batches`, and for `y` beside a data set.
    """
    if is_in_memory(x):
        arrays = arrays_of(x)
        length_of(arrays)
        return arrays, None if y is None else np.asarray(y)
    refuse_targets(x, y)
    parts = list(batches(x, steps=steps))
    inputs = tree.map_structure(
        lambda *leaves: np.concatenate(leaves), *(p[0] for p in parts)
    )
    if any(targets is None for _, targets in parts):
        return inputs, None
    return inputs, np.concatenate([targets for _, targets in parts])


def refuse_targets(x: Any, y: Any) -> None:
    """Raises for targets beside a data set, which has its own."""
    if y is not None:
        raise ValueError(
            "`y` must be None where `x` is a data set or a generator, which yields "
            f"(x, y). Received: x of type {type(x).__name__} and y of type "
            f"{type(y).__name__}"
        )


def require_targets(y: Any, name: str = "y") -> Any:
    """Returns targets, and raises where there are none."""
    if y is None:
        raise ValueError(
            f"`{name}` must be given, or come with the data set as (x, y). "
            f"Received: {name}=None"
        )
    return y
