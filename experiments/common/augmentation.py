"""Images that are shifted, mirrored and cut at random, each for itself.

What happens to an image is drawn apart from doing it, which a device may do as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

#: "crop": padded by 4 pixels of the mirror image, "pad_crop": by zeros; "cutout": a square
#: of 16x16 pixels is blackened.
AUGMENTATIONS = (
    "none",
    "flip",
    "crop_flip",
    "pad_crop",
    "pad_crop_flip",
    "pad_crop_flip_cutout",
)

#: How far images are shifted at most, in pixels.
PAD = 4


def pad(images: np.ndarray, augmentation: str) -> np.ndarray:
    """Images with a border to shift in, where the augmentation shifts.

    Shifted in images are continued by their mirror image, as in the authors' code of
    Neural Similarity Learning, or by zeros, as in that of Meta-Neighborhoods.
    """
    if "crop" not in augmentation:
        return images
    mode: Any = "constant" if "pad" in augmentation else "symmetric"
    return np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)), mode=mode)


def draw_moves(
    image_shape: Sequence[int],
    count: int,
    augmentation: str,
    generator: np.random.Generator,
) -> tuple[np.ndarray, ...]:
    """What is done to each of `count` images: arrays with a line an image.

    Rows and columns of the padded image that are taken and, where a square is cut, which
    rows and columns of the result lie in it.
    """
    height, width, _ = image_shape
    rows = np.tile(np.arange(height, dtype="int32"), (count, 1))
    columns = np.tile(np.arange(width, dtype="int32"), (count, 1))
    if "crop" in augmentation:
        rows += generator.integers(0, 2 * PAD + 1, (count, 1)).astype("int32")
        columns += generator.integers(0, 2 * PAD + 1, (count, 1)).astype("int32")
    if "flip" in augmentation:
        mirrored = generator.random((count, 1)) < 0.5
        columns = np.where(mirrored, columns[:, ::-1], columns)
    if "cutout" not in augmentation:
        return rows, columns
    return (
        rows,
        columns,
        *(
            np.abs(2 * (np.arange(size) - generator.integers(0, size, (count, 1))) + 1) < 16
            for size in (height, width)
        ),
    )


def take_moved(images: Any, chosen: Any, rows: Any, columns: Any, *cut: Any) -> Any:
    """The chosen ones of padded images, moved and cut; of NumPy or JAX arrays."""
    taken = images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
    if cut:
        cut_rows, cut_columns = cut
        taken = taken * ~(cut_rows[:, :, None] & cut_columns[:, None, :])[..., None]
    return taken


def augmented(
    images: np.ndarray, augmentation: str, generator: np.random.Generator
) -> np.ndarray:
    """Images of which each is moved in a way of its own."""
    moves = draw_moves(images.shape[1:], len(images), augmentation, generator)
    moved: np.ndarray = take_moved(
        pad(images, augmentation), np.arange(len(images)), *moves
    )
    return moved
