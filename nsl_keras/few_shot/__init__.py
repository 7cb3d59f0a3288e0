"""Few-shot learning: learn new classes or functions from a few examples.

`EpisodeSampler` draws episodes of a few classes. Use `NearestCentroid` or `Finetuner` on a
pretrained network; `ProtoNet`, `NeighborhoodLearner` and `MAML` train on episodes.
`evaluate` and `compare` return accuracies with their intervals.
"""

from nsl_keras.few_shot.class_logits import ClassLogits
from nsl_keras.few_shot.classes import select_classes, split_classes
from nsl_keras.few_shot.dampened_momentum import DampenedMomentum
from nsl_keras.few_shot.episodes import Episode, EpisodeSampler
from nsl_keras.few_shot.evaluation import Difference, Evaluation, compare, evaluate
from nsl_keras.few_shot.finetuning import Finetuner
from nsl_keras.few_shot.maml import MAML
from nsl_keras.few_shot.nearest_centroid import NearestCentroid
from nsl_keras.few_shot.neighborhood import NeighborhoodLearner
from nsl_keras.few_shot.prototypical import ProtoNet
from nsl_keras.few_shot.second_order import check_second_order

__all__ = [
    "MAML",
    "ClassLogits",
    "DampenedMomentum",
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
