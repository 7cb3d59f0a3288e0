"""Arguments and calls that once ended the process, ran without end, or passed."""

import functools

import pytest

from nsl_keras import backbones, key_metrics, layers

#: Callable, argument, and the largest number it takes.
LARGEST = [
    (
        lambda **given: layers.MetaNeighborhoodHead(layers.CosineDense(3), 5, **given),
        "inner_steps",
        "1,000",
    ),
    (layers.NeighborDictionary, "num_neighbors", "2,147,483,647"),
    (functools.partial(backbones.convnet4, (32, 32, 3)), "filters", "2,147,483,647"),
]


@pytest.mark.parametrize(("make", "name", "largest"), LARGEST)
def test_numbers_that_would_end_the_process(make, name, largest):
    with pytest.raises(
        ValueError, match=rf"`{name}` must be at most {largest}\..*={2**31}"
    ):
        make(**{name: 2**31})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (layers.InstanceFiLM, "learn_sharpness"),
        (layers.InstanceFiLM, "residual"),
        (functools.partial(layers.NeighborDictionary, 5), "learn_temperature"),
        (key_metrics.Euclidean, "squared"),
    ],
)
def test_words_are_no_booleans(make, name):
    with pytest.raises(ValueError, match=f"`{name}` must be True or False.*='False'"):
        make(**{name: "False"})
