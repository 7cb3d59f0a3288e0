"""Examples and their classes: checks and splits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nsl_keras import validation
from nsl_keras.training.data import array_of


def split_classes(
    labels: Any, sizes: Sequence[int] | Sequence[float], seed: int = 0
) -> list[np.ndarray]:
    """Splits classes at random into disjoint sets, for evaluation on unseen classes.

    Args:
        labels: Array of shape `(n,)`: the class of each example, a number or a name.
        sizes: The sizes of the sets: ints that add up to the number of classes, or floats
            that add up to 1.
        seed: int, fixes the draw.

    Returns:
        A list of sorted arrays of classes, one per size.

    Raises:
        ValueError: If the sizes do not add up, or leave a set without classes.

    Example:

    >>> from nsl_keras import few_shot
    >>> labels = ["cat", "cat", "cow", "dog", "dog", "owl"]
    >>> train, test = few_shot.split_classes(labels, (0.75, 0.25), seed=1)
    >>> len(train), len(test), len({*train} & {*test})
    (3, 1, 0)
    """
    classes = np.unique(as_classes(labels))
    if all(isinstance(size, (int, np.integer)) for size in sizes):
        counts = list(sizes)
    else:
        ends = np.round(np.cumsum(sizes) * len(classes)).astype(int)
        counts = np.diff([0, *ends]).tolist() if np.isclose(np.sum(sizes), 1) else []
    demand = (
        f"integers that add up to {len(classes)} (the classes), or fractions that add up "
        "to 1, with a class in every set"
    )
    add_up = min(counts, default=0) > 0 and sum(counts) == len(classes)
    validation.require(add_up, "sizes", demand, tuple(sizes))
    seed = validation.non_negative_integer(seed, "seed")
    shuffled = np.random.default_rng(seed).permutation(classes)
    return [np.sort(part) for part in np.split(shuffled, np.cumsum(counts)[:-1])]


def select_classes(images: Any, labels: Any, classes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Picks the examples of some classes.

    Args:
        images: Array of shape `(n, ...)`, images or other examples.
        labels: Array of shape `(n,)`: the class of each example, a number or a name.
        classes: Array of classes, as `split_classes` returns them.

    Returns:
        `(images, labels)` of these classes alone, in the same order.

    Raises:
        ValueError: If a class has no example, or for bad examples or labels.

    Example:

    >>> import numpy as np
    >>> from nsl_keras import few_shot
    >>> images = np.zeros((4, 8, 8, 3), "uint8")
    >>> some, labels = few_shot.select_classes(images, [7, 8, 9, 8], [8, 9])
    >>> some.shape, labels.tolist()
    ((3, 8, 8, 3), [8, 9, 8])
    """
    images, labels = checked_examples(images, labels)
    classes = np.unique(as_classes(classes, "classes"))
    absent = classes[~np.isin(classes, labels)]
    if len(absent):
        raise ValueError(
            "`classes` must be among the labels. Received: classes without an example, "
            f"{absent.tolist()}"
        )
    chosen = np.isin(labels, classes)
    return images[chosen], labels[chosen]


def checked_examples(images: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns examples and their classes as arrays; arrays are not copied."""
    images = _without_objects(array_of(images))
    demand = "numbers or text, not objects of other types"
    validation.require(images.dtype != object, "images", demand, images.dtype)
    if images.ndim == 0 or 0 in images.shape:
        raise ValueError(
            "`images` must have shape (n, ...), for example (n, height, width, channels), "
            f"with no size 0. Received: images.shape={images.shape}"
        )
    validation.finite(images, "images")
    labels = as_classes(labels)
    validation.one_per_example(labels, len(images))
    return images, labels


def as_classes(labels: Any, name: str = "labels") -> np.ndarray:
    """Returns classes, integers or strings, as an array of rank 1."""
    values = _without_objects(array_of(labels))
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or values.dtype.kind not in "iuU":
        raise ValueError(
            f"`{name}` must be class numbers or names (integers or strings), of shape "
            f"(n,) or (n, 1). Received: {name} of dtype {values.dtype} and shape "
            f"{values.shape}"
        )
    return values


def _without_objects(array: np.ndarray) -> np.ndarray:
    """Returns text as NumPy's strings; pandas and TensorFlow hold it as objects."""
    if array.dtype == object and all(isinstance(each, str) for each in array.flat):
        return array.astype(str)
    return array
