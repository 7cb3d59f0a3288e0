"""What pictures read from a model and its data, in any form that `predict` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from nsl_keras.training import data

#: An entry is undecided if its most probable class is less probable than this.
UNDECIDED = 0.5


def require_classifier(model: keras.Model) -> None:
    """Raises unless a `MetaNeighborhoodModel` has classes."""
    task = getattr(model, "task", None)
    if task != "classification":
        raise ValueError(
            "`model` must be a classifier, a MetaNeighborhoodModel. "
            f"Received: a {type(model).__name__} with task={task!r}"
        )


def images_in(x: Any) -> np.ndarray | None:
    """Returns the first inputs that are images, as `(n, height, width, channels)`."""
    images = next((each for each in data.leaves(x) if each.ndim == 4), None)
    if images is None or keras.config.image_data_format() == "channels_last":
        return images
    return np.moveaxis(images, 1, -1)


def require_images(x: Any, name: str) -> np.ndarray:
    """Returns the images among the inputs, and raises if there are none."""
    images = images_in(x)
    if images is None:
        shapes = ", ".join(str(each.shape) for each in data.leaves(x))
        raise ValueError(
            f"`{name}` must hold images, of shape (n, height, width, channels). "
            f"Received: {name} of shape {shapes}"
        )
    return images


def attention_of(model: keras.Model, x: Any) -> np.ndarray:
    """Returns the attention of all examples, of shape `(n, num_neighbors)`."""
    return data.predict(
        lambda batch: model.dictionary.attention(model.features(batch, training=False)),
        model,
        x,
    )


def places(numbers: Any, count: int, name: str) -> np.ndarray:
    """Returns numbers of rows, which must be among the first `count`."""
    found = np.asarray(numbers)
    if (
        found.dtype.kind not in "iu"
        or found.ndim != 1
        or not np.isin(found, range(count)).all()
    ):
        raise ValueError(
            f"`{name}` must be numbers from 0 to {count - 1}. Received: {name}={numbers!r}"
        )
    return found


def names_of(classes: int, class_names: Sequence[str] | None) -> list[str]:
    """Returns the names of the classes; by default their numbers."""
    names = range(classes) if class_names is None else class_names
    if len(names) != classes:
        raise ValueError(
            f"`class_names` must hold {classes} names, one for each class. "
            f"Received: {len(names)} names"
        )
    return [str(name) for name in names]
