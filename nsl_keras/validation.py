"""Checks of arguments and of data, with errors in Keras's form.

Each check raises a `ValueError` with the argument, the allowed and the received values.
Checks of arguments return the standardized value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

#: How far the sum of a row of probabilities may be from 1: bfloat16 has eight bits.
SUM_TOLERANCE = 1e-2


def require(condition: Any, name: str, demand: str, value: Any) -> None:
    """Raises unless the condition holds: "`name` must be (the demand)"."""
    if not condition:
        raise ValueError(f"`{name}` must be {demand}. Received: {name}={value!r}")


def optional(check: Callable[..., Any], value: Any, *arguments: Any) -> Any:
    """Returns the result of a check of this module, or `None` for `None`."""
    return None if value is None else check(value, *arguments)


def one_of(value: Any, allowed: Iterable[Any], name: str) -> Any:
    """Returns `value` if it is one of `allowed`."""
    allowed = list(allowed)
    # Types first, because an array compares with a name entry by entry.
    found = any(isinstance(value, type(each)) and value == each for each in allowed)
    require(found, name, f"one of {', '.join(map(repr, allowed))}", value)
    return value


def boolean(value: Any, name: str) -> bool:
    """Returns `value` as a bool: the text "no" would count as true."""
    require(isinstance(value, (bool, np.bool_)), name, "True or False", value)
    return bool(value)


def positive_integer(value: Any, name: str) -> int:
    """Returns `value` as an int of at least 1."""
    require(_is_integer(value) and value >= 1, name, "a positive integer", value)
    return int(value)


def non_negative_integer(value: Any, name: str) -> int:
    """Returns `value` as an int of at least 0."""
    require(_is_integer(value) and value >= 0, name, "an integer of at least 0", value)
    return int(value)


def positive_integers(value: Any, length: int, name: str) -> tuple[int, ...]:
    """Returns `value`, an int or a sequence of `length` ints, as a tuple of positives."""
    entries = (value,) * length if isinstance(value, (int, np.integer)) else value
    valid = isinstance(entries, Sequence) and len(entries) == length
    valid = valid and all(_is_integer(each) and each >= 1 for each in entries)
    require(valid, name, f"a positive integer or {length} of them", value)
    return tuple(map(int, entries))


def positive_number(value: Any, name: str) -> float:
    """Returns `value` as a finite float above zero."""
    require(_is_finite(value) and value > 0, name, "a finite number above zero", value)
    return float(value)


def non_negative_number(value: Any, name: str) -> float:
    """Returns `value` as a finite float of at least zero."""
    demand = "a finite number of at least zero"
    require(_is_finite(value) and value >= 0, name, demand, value)
    return float(value)


def fraction(value: Any, name: str) -> float:
    """Returns `value` as a float in [0, 1)."""
    require(_is_finite(value) and 0 <= value < 1, name, "a number in [0, 1)", value)
    return float(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    is_float = isinstance(value, (float, np.floating))
    return _is_integer(value) or (is_float and math.isfinite(value))


def known_axis(input_shape: Sequence[Any], axis: int, name: str) -> Any:
    """Returns the size of an axis, which `build` must know."""
    size, demand = input_shape[axis], f"known at the {name}"
    require(size is not None, "input_shape", demand, tuple(input_shape))
    return size


def fits(one: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """Whether two shapes are equal as far as they are known."""
    return len(one) == len(other) and all(
        None in pair or pair[0] == pair[1] for pair in zip(one, other, strict=True)
    )


def require_finite(array: Any, name: str) -> None:
    """Raises if a floating-point array contains NaN or an infinity."""
    values = _as_numpy(array)
    if values.dtype.kind == "f":
        _require_all(np.isfinite(values), name, "be finite", values)


def require_class_labels(labels: Any, num_classes: int, name: str = "y") -> None:
    """Raises unless `labels` are classes: integers in range, or rows of probabilities."""
    values = _finite_numbers(labels, name)
    if values.ndim == 2 and values.shape[1] == num_classes and num_classes > 1:
        return require_probabilities(values, name)
    is_vector = values.ndim and values.shape[1:] in ((), (1,))
    demand = f"(n,), (n, 1) or (n, {num_classes})"
    require(is_vector, f"{name}.shape", demand, values.shape)
    values = values.reshape(-1)
    sound = (values == np.floor(values)) & (values >= 0) & (values < num_classes)
    _require_all(sound, name, f"hold classes 0 to {num_classes - 1}", values)


def require_one_per_example(labels: Any, examples: int, name: str = "labels") -> None:
    """Raises unless there are as many labels, or targets, as examples."""
    demand = f"{examples}, one label per example"
    require(len(labels) == examples, f"len({name})", demand, len(labels))


def require_probabilities(array: Any, name: str) -> None:
    """Raises unless each row of a matrix is a probability distribution."""
    values = _finite_numbers(array, name)
    sums = values.sum(axis=1, dtype="float64")
    sound = (values >= 0).all(axis=1) & (np.abs(sums - 1) <= SUM_TOLERANCE)
    demand = (
        "hold a probability distribution over the classes in each row (one-hot or soft "
        "labels, not several labels): numbers of at least 0 that sum to 1"
    )
    _require_all(sound, name, demand, values)


def require_targets(array: Any, num_outputs: int) -> None:
    """Raises unless an array contains finite targets of a regression."""
    shape = _finite_numbers(array, "y").shape
    is_valid = shape[1:] == (num_outputs,) or (len(shape) == num_outputs == 1)
    allowed = f"(n, {num_outputs})" + (" or (n,)" if num_outputs == 1 else "")
    require(is_valid, "y.shape", f"the shape of the head's outputs, {allowed}", shape)


def require_built(layer: Any, what: str) -> None:
    """Raises unless a layer is built."""
    if not layer.built:
        raise ValueError(
            f"`{what}` needs a built layer or model. Call the layer on data first, or "
            f"call its `build(input_shape)`. Received: unbuilt {layer.name!r}"
        )


def _finite_numbers(array: Any, name: str) -> np.ndarray:
    values = _as_numpy(array)
    demand = "numbers; np.unique(names, return_inverse=True)[1] encodes class names"
    require(values.dtype.kind in "biuf", name, demand, values)
    require_finite(values, name)
    return values


def _require_all(sound: np.ndarray, name: str, demand: str, values: np.ndarray) -> None:
    """Raises with the first value, or the first row, for which a condition is false."""
    if not sound.all():
        first = tuple(map(int, np.argwhere(~sound)[0]))
        raise ValueError(
            f"`{name}` must {demand}. Received: {np.sum(~sound)} others, the first at "
            f"index {first}: {values[first].tolist()}"
        )


def _as_numpy(data: Any) -> np.ndarray:
    values = np.asarray(data)
    # To NumPy, bfloat16 is not a number.
    return values.astype("float32") if values.dtype.name == "bfloat16" else values
