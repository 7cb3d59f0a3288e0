"""Dictionary entries from examples: which ones, and what their labels become."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation

if TYPE_CHECKING:
    from nsl_keras.neighborhoods.dictionary import NeighborDictionary

#: What a value keeps of its label; the rest goes to all classes, so that the logits are
#: finite and can still learn.
CERTAINTY = 0.99


def require_same_length(examples: Any, y: Any, name: str, name_of_y: str = "y") -> None:
    """Raises unless there is one label or target for each example."""
    if len(examples) != len(y):
        raise ValueError(
            f"`{name}` and `{name_of_y}` must have the same length. "
            f"Received: len({name})={len(examples)}, len({name_of_y})={len(y)}"
        )


def draw_examples(
    dictionary: NeighborDictionary, y: np.ndarray, seed: int | None
) -> np.ndarray:
    """Draws the examples for a dictionary, without replacement.

    Args:
        dictionary: The dictionary.
        y: Labels or targets of all examples.
        seed: Seed of the draw.

    Returns:
        Indices of the examples, one an entry.

    Raises:
        ValueError: If there are fewer examples than entries; for labels outside the
            classes, and for classes without an example.
    """
    entries, outputs = dictionary.num_neighbors, dictionary.num_values
    if dictionary.task == "classification":
        validation.class_labels(y, outputs)
    else:
        validation.targets(y, outputs)
    if len(y) < entries:
        raise ValueError(
            "`y` must have at least as many examples as the dictionary has entries. "
            f"Received: {len(y)} examples, num_neighbors={entries}"
        )
    generator = keras.random.SeedGenerator(seed)
    draws = ops.convert_to_numpy(keras.random.uniform((len(y),), seed=generator))
    if dictionary.task == "regression":
        return np.argsort(draws)[:entries]
    probabilities = _as_probabilities(y, outputs)
    classes = np.argmax(probabilities, axis=1)
    by_class = [
        members[np.argsort(draws[members])]
        for members in (np.flatnonzero(classes == label) for label in range(outputs))
    ]
    unseen = [label for label, members in enumerate(by_class) if not len(members)]
    if unseen:
        raise ValueError(
            "`y` must hold every class. Received: no example of class "
            f"{', '.join(map(str, unseen))}"
        )
    if dictionary.fixed_values is True:
        return _drawn_for(dictionary.fixed_classes(), by_class)
    # In rounds over the classes: the first of each, then the second of each, ...
    rounds = np.concatenate([np.arange(len(members)) for members in by_class])
    order = np.argsort(rounds, kind="stable")[:entries]
    return np.concatenate(by_class)[order]


def _drawn_for(wanted: np.ndarray, by_class: list[np.ndarray]) -> np.ndarray:
    """One example for each of the wanted classes, which are sorted."""
    counts = np.bincount(wanted, minlength=len(by_class))
    for label, (members, count) in enumerate(zip(by_class, counts, strict=True)):
        if len(members) < count:
            raise ValueError(
                "`y` must have an example for each entry of a class with fixed values. "
                f"Received: {len(members)} examples of class {label}, which has "
                f"{count} entries"
            )
    return np.concatenate(
        [members[:count] for members, count in zip(by_class, counts, strict=True)]
    )


def assign_examples(
    dictionary: NeighborDictionary, features: np.ndarray, y: np.ndarray
) -> None:
    """Makes each of the drawn examples an entry.

    Args:
        dictionary: The built dictionary.
        features: Array of shape `(num_neighbors, features)`.
        y: Labels or targets of these examples.

    Raises:
        ValueError: For features that are not finite, or all zero under the cosine
            metric; and for a dictionary of given values.
    """
    if isinstance(dictionary.fixed_values, list):
        raise ValueError(
            "`fixed_values` must be True or False for entries from examples: values that "
            "are given do not belong to them. Received: a dictionary of given values"
        )
    features = dictionary.checked_keys(features, "features")
    if dictionary.fixed_values is True:
        dictionary.assign(keys=features)
    elif dictionary.task == "regression":
        dictionary.assign(features, np.reshape(y, (-1, dictionary.num_values)))
    else:
        classes = dictionary.num_values
        values = CERTAINTY * _as_probabilities(y, classes) + (1 - CERTAINTY) / classes
        dictionary.assign(features, values)


def _as_probabilities(y: np.ndarray, classes: int) -> np.ndarray:
    """Labels, already checked, as rows of probabilities."""
    if y.ndim == 2 and y.shape[1] == classes:
        return y
    return np.eye(classes)[np.reshape(y, -1).astype("int64")]
