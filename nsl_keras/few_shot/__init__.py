"""Few-shot learning: episodes of a few classes with a few labelled images each."""

from nsl_keras.few_shot.class_splits import (
    disjoint,
    select_classes,
    split_classes,
)
from nsl_keras.few_shot.episodes import Episode, EpisodeSampler
from nsl_keras.few_shot.rotations import rotated_classes

__all__ = [
    "Episode",
    "EpisodeSampler",
    "disjoint",
    "rotated_classes",
    "select_classes",
    "split_classes",
]
