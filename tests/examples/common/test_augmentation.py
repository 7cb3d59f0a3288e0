"""Images are shifted, mirrored and cut as their augmentation's name says."""

import numpy as np
import pytest

from examples.common.augmentation import AUGMENTATIONS, augmented


@pytest.mark.parametrize("augmentation", AUGMENTATIONS[:-1])
def test_augmentation(augmentation):
    rng = np.random.default_rng(0)
    images = rng.random((200, 6, 6, 2)).astype("float32")
    found = augmented(images, augmentation, np.random.default_rng(1))
    assert found.shape == images.shape
    mode = "constant" if augmentation.startswith("pad") else "symmetric"
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)), mode=mode)
    shifts = range(9) if "crop" in augmentation else [4]
    mirrors = (1, -1) if "flip" in augmentation else (1,)
    seen = set()
    for image, source in zip(found, padded, strict=True):
        places = [
            (row, column, mirror)
            for row in shifts
            for column in shifts
            for mirror in mirrors
            if np.array_equal(
                image, source[row : row + 6, column : column + 6][:, ::mirror]
            )
        ]
        assert places, "not a shifted, mirrored copy of its image"
        seen.update(places)
    # Of 162 places 200 images find most.
    assert len(seen) > 0.6 * len(shifts) ** 2 * len(mirrors)


def test_cutout():
    images = np.ones((300, 32, 24, 1), "float32")
    whole, cut = (
        augmented(images, augmentation, np.random.default_rng(1))
        for augmentation in ("pad_crop_flip", "pad_crop_flip_cutout")
    )
    # The same images but for the square, which the border may cut.
    assert np.all((cut == whole) | (cut == 0))
    sizes = [
        [np.ptp(np.flatnonzero(image.min(axis)[:, 0] == 0)) + 1 for axis in (1, 0)]
        for image in 1 - (whole - cut)
    ]
    assert np.max(sizes, axis=0).tolist() == [16, 16]
    assert np.min(sizes) >= 4
