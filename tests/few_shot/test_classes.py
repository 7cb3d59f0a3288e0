"""Classes: their splits, disjoint and complete, and their examples."""

import numpy as np
import pytest

from nsl_keras import few_shot

LABELS = np.repeat(np.arange(10, 30), 3)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((12, 5, 3), [12, 5, 3]),
        ((0.6, 0.25, 0.15), [12, 5, 3]),
        (np.array([0.5, 0.5]), [10, 10]),
        ((1.0,), [20]),
    ],
)
def test_sizes(sizes, expected):
    parts = few_shot.split_classes(LABELS, sizes, seed=4)
    assert [len(part) for part in parts] == expected
    assert sorted(np.concatenate(parts)) == list(range(10, 30))
    assert all((np.diff(part) > 0).all() for part in parts)


def test_fractions_lose_no_class_to_rounding():
    for classes in range(3, 40):
        parts = few_shot.split_classes(range(classes), (1 / 3, 1 / 3, 1 / 3))
        assert sum(map(len, parts)) == classes
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_seed_decides():
    one, same, other = (
        few_shot.split_classes(LABELS, (10, 10), seed=seed)[0] for seed in (1, 1, 2)
    )
    assert np.array_equal(one, same) and not np.array_equal(one, other)
    # Neither the order of the images nor their number counts.
    backwards = few_shot.split_classes(range(29, 9, -1), (10, 10), seed=1)[0]
    assert np.array_equal(one, backwards)
    with pytest.raises(ValueError, match="`seed` must be an integer of at least 0"):
        few_shot.split_classes(LABELS, (10, 10), seed=None)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((), r"`sizes` must be integers that add up to 20"),
        ((10, 9), r"\(the classes\).*Received: sizes=\(10, 9\)"),
        ((20, 0), r"with a class in every set\. Received: sizes=\(20, 0\)"),
        ((0.5, 0.4), r"fractions that add up to 1.* Received: sizes=\(0.5, 0.4\)"),
        ((1.5, -0.5), r"fractions that add up to 1"),
        ((0.99, 0.01), r"with a class in every set"),
    ],
)
def test_bad_sizes(sizes, message):
    with pytest.raises(ValueError, match=message):
        few_shot.split_classes(LABELS, sizes)


def test_select_classes():
    images = np.arange(6, dtype="uint8").reshape(6, 1, 1, 1)
    names = ["b", "a", "c", "a", "b", "c"]
    for given in (names, np.array(names, object)):
        chosen, labels = few_shot.select_classes(images, given, ["c", "a"])
        assert chosen.ravel().tolist() == [1, 2, 3, 5]
        assert labels.tolist() == ["a", "c", "a", "c"]
    with pytest.raises(
        ValueError, match=r"`classes` must be among.*Received.*\['d', 'e'\]"
    ):
        few_shot.select_classes(images, names, ["a", "e", "d"])
