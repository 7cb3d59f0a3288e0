"""Few-shot learning: learn new classes or functions from a few examples.

`EpisodeSampler` draws episodes of a few classes. Use `NearestCentroid` or `Finetuner` on a
pretrained network; `ProtoNet`, `NeighborhoodLearner` and `MAML` train on episodes.
`evaluate` and `compare` give accuracies with their intervals.
"""

from nsl_keras.few_shot.classes import (
    select_classes,
    split_classes,
)
from nsl_keras.few_shot.dampened_momentum import DampenedMomentum
from nsl_keras.few_shot.episodes import Episode, EpisodeSampler
from nsl_keras.few_shot.evaluation import Difference, Evaluation, compare, evaluate
from nsl_keras.few_shot.finetuning import Finetuner, finetuning_recipe
from nsl_keras.few_shot.maml import MAML
from nsl_keras.few_shot.neighborhood import NeighborhoodLearner
from nsl_keras.few_shot.pretrained import NearestCentroid
from nsl_keras.few_shot.prototypical import ProtoNet

__all__ = [
    "MAML",
    "DampenedMomentum",
    "Difference",
    "Episode",
    "EpisodeSampler",
    "Evaluation",
    "Finetuner",
    "NearestCentroid",
    "NeighborhoodLearner",
    "ProtoNet",
    "compare",
    "evaluate",
    "finetuning_recipe",
    "select_classes",
    "split_classes",
]
