"""Images that are shifted, mirrored and cut at random, each for itself."""

from __future__ import annotations

from typing import Any

import numpy as np

#: "crop": padded by 4 pixels of the mirror image, as in the authors' code of Neural
#: Similarity Learning; "pad_crop": by zeros, as in that of Meta-Neighborhoods; "cutout": a
#: square of 16x16 pixels is blackened.
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


def augmented(
    images: np.ndarray, augmentation: str, generator: np.random.Generator
) -> np.ndarray:
    """Images, each of them moved differently."""
    count, height, width, _ = images.shape
    rows = np.tile(np.arange(height), (count, 1))
    columns = np.tile(np.arange(width), (count, 1))
    if "crop" in augmentation:
        mode: Any = "constant" if "pad" in augmentation else "symmetric"
        images = np.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)), mode=mode)
        rows += generator.integers(0, 2 * PAD + 1, (count, 1))
        columns += generator.integers(0, 2 * PAD + 1, (count, 1))
    if "flip" in augmentation:
        mirrored = generator.random((count, 1)) < 0.5
        columns = np.where(mirrored, columns[:, ::-1], columns)
    moved = images[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    if "cutout" in augmentation:
        cut_rows, cut_columns = (
            np.abs(2 * (np.arange(size) - generator.integers(0, size, (count, 1))) + 1) < 16
            for size in (height, width)
        )
        moved[cut_rows[:, :, None] & cut_columns[:, None, :]] = 0
    return moved
