"""Few-shot learning: learn new classes or functions from a few examples.

`EpisodeSampler` draws episodes of a few classes. Use `NearestCentroid` or `Finetuner` on a
pretrained network; `ProtoNet`, `NeighborhoodLearner` and `MAML` train on episodes.
`evaluate` and `compare` return accuracies with their intervals.
"""

from nsl_keras.few_shot.class_logits import ClassLogits
from nsl_keras.few_shot.episodes import (
    Episode,
    EpisodeSampler,
    select_classes,
    split_classes,
)
from nsl_keras.few_shot.evaluation import Difference, Evaluation, compare, evaluate
from nsl_keras.few_shot.finetuning import Finetuner
from nsl_keras.few_shot.functional import check_second_order
from nsl_keras.few_shot.maml import MAML
from nsl_keras.few_shot.neighborhood import NeighborhoodLearner
from nsl_keras.few_shot.prototypical import NearestCentroid, ProtoNet

__all__ = [
    "MAML",
    "ClassLogits",
    "Difference",
    "Episode",
    "EpisodeSampler",
    "Evaluation",
    "Finetuner",
    "NearestCentroid",
    "NeighborhoodLearner",
    "ProtoNet",
    "check_second_order",
    "compare",
    "evaluate",
    "select_classes",
    "split_classes",
]
