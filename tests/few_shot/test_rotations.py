"""Turned images as classes of their own."""

import numpy as np
import pytest

from nsl_keras import few_shot


def test_turned_images_are_new_classes():
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 3, 2), "uint8")
    labels = np.array([40, 7, 40, 9, 7, 9])
    more, numbers = few_shot.rotated_classes(images, labels)
    assert more.shape == (24, 3, 3, 2) and more.dtype == np.uint8
    ranks = np.array([2, 0, 2, 1, 0, 1])
    assert numbers.tolist() == [*ranks, *ranks + 3, *ranks + 6, *ranks + 9]
    for i, image in enumerate(images):
        for turn in range(4):
            turned = more[6 * turn + i]
            for row in range(3):
                for column in range(3):
                    r, c = row, column
                    for _ in range(turn):
                        r, c = 2 - c, r  # Anticlockwise.
                    assert (turned[r, c] == image[row, column]).all()


def test_only_squares_can_be_turned():
    with pytest.raises(ValueError, match=r"must be square.*\(2, 4, 5, 1\)"):
        few_shot.rotated_classes(np.zeros((2, 4, 5, 1)), [0, 1])


def test_images_and_labels_are_checked():
    with pytest.raises(ValueError, match="1 labels for 2 images"):
        few_shot.rotated_classes(np.zeros((2, 4, 4, 1)), [0])
