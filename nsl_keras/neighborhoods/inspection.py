"""What pictures and callbacks read off a built model and its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel


def require_classifier(model: MetaNeighborhoodModel) -> None:
    """Raises unless a model has classes."""
    if model.task != "classification":
        raise ValueError(
            f"`model` must be a classifier. Received: a model with task={model.task!r}"
        )


def class_numbers(labels: Any, classes: int, name: str = "y") -> np.ndarray:
    """Returns class numbers, of shape `(n,)`, for any labels that `fit` takes."""
    labels = np.asarray(labels)
    validation.class_labels(labels, classes, name)
    if labels.ndim == 2 and labels.shape[1] == classes:
        return labels.argmax(axis=1)
    return labels.reshape(-1).astype("int64")


def names_of(classes: int, class_names: Sequence[str] | None) -> list[str]:
    """The classes' names; their numbers where none are given."""
    if class_names is None:
        return [str(number) for number in range(classes)]
    if len(class_names) != classes:
        raise ValueError(
            f"`class_names` must hold {classes} names, one a class. "
            f"Received: {len(class_names)} names"
        )
    return [str(name) for name in class_names]


def in_batches(function: Callable[[Tensor], Tensor], x: Any) -> np.ndarray:
    """What a function of a batch returns for all examples, as an array."""
    x = np.asarray(x)
    return np.concatenate(
        [
            ops.convert_to_numpy(function(ops.convert_to_tensor(x[start : start + 128])))
            for start in range(0, len(x), 128)
        ]
    )


def features_of(model: MetaNeighborhoodModel, x: Any) -> np.ndarray:
    """Features of all examples, of shape `(n, features)`."""
    return in_batches(lambda batch: model.features(batch, training=False), x)


def attention_of(model: MetaNeighborhoodModel, x: Any) -> np.ndarray:
    """Attention of all examples over the entries, of shape `(n, num_neighbors)`."""
    return in_batches(
        lambda batch: model.neighborhood.dictionary.attention(
            model.features(batch, training=False)
        ),
        x,
    )
