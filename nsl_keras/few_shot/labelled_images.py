"""What the data functions of this room ask of images and their classes."""

from __future__ import annotations

from typing import Any

import numpy as np

from nsl_keras import validation

#: How many names an error spells out.
_NAMES_IN_ERRORS = 10


def checked(images: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns images and their classes as arrays, uncopied where they are arrays already.

    Raises:
        ValueError: If the images are not of rank 4, not finite or neither uint8 nor
            floating-point, or the labels not one for each image.
    """
    images = np.asarray(images)
    if images.ndim != 4 or 0 in images.shape:
        raise ValueError(
            "`images` must have shape (n, height, width, channels), none of them 0. "
            f"Received: images.shape={images.shape}"
        )
    # Of other integers, nobody knows which of them stands for white.
    if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
        raise ValueError(
            "`images` must be uint8, in [0, 255], or floating-point. "
            f"Received: images of dtype {images.dtype}"
        )
    validation.finite(images, "images")
    labels = class_labels(labels)
    if len(labels) != len(images):
        raise ValueError(
            "`labels` must hold one class for each image. "
            f"Received: {len(labels)} labels for {len(images)} images"
        )
    return images, labels


def class_labels(labels: Any, name: str = "labels") -> np.ndarray:
    """Returns classes, integers or strings, as an array of rank 1.

    Raises:
        ValueError: If they are something else.
    """
    values = np.asarray(labels)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1 or values.dtype.kind not in "iuU":
        raise ValueError(
            f"`{name}` must be class numbers or names (integers or strings), of shape "
            f"(n,) or (n, 1). Received: {name} of dtype {values.dtype} and shape "
            f"{values.shape}"
        )
    return values


def listed(classes: Any) -> str:
    """Names the classes, the first ones of many."""
    names = [repr(each.item()) for each in classes[:_NAMES_IN_ERRORS]]
    more = len(classes) - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
