"""More classes for training: turned images count as classes of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from nsl_keras.few_shot.labelled_images import checked


def rotated_classes(images: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Adds the images turned by 90, 180 and 270 degrees as new classes.

    The usual augmentation of Omniglot's training classes: a turned letter is another
    letter. Split classes before, and turn those for training alone: a turned class is not
    unrelated to the class it was made from.

    Args:
        images: Array of shape `(n, size, size, channels)`.
        labels: Array of shape `(n,)`: the class of each, a number or a name.

    Returns:
        `(images, labels)`, four times as many: those turned by 0, 90, 180 and 270 degrees
        (anticlockwise), one after the other. With C classes, the i-th in sorted order
        becomes the class numbers `i`, `i + C`, `i + 2 C` and `i + 3 C`.

    Raises:
        ValueError: If the images are not square, or on bad images or labels.

    Example:

    >>> import numpy as np
    >>> from nsl_keras import few_shot
    >>> images = np.arange(8, dtype="uint8").reshape(2, 2, 2, 1)
    >>> more, labels = few_shot.rotated_classes(images, [0, 1])
    >>> labels.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> more[2, ..., 0].tolist()
    [[1, 3], [0, 2]]

    Reference: Santoro et al., Meta-Learning with Memory-Augmented Neural Networks (2016).
    """
    images, labels = checked(images, labels)
    if images.shape[1] != images.shape[2]:
        raise ValueError(
            f"`images` must be square to be turned. Received: images.shape={images.shape}"
        )
    classes, numbers = np.unique(labels, return_inverse=True)
    turns = range(4)
    return (
        np.concatenate([np.rot90(images, turn, axes=(1, 2)) for turn in turns]),
        np.concatenate([numbers + turn * len(classes) for turn in turns]),
    )
