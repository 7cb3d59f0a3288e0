"""Few-shot learning: learn new classes or functions from a few examples.

`EpisodeSampler` draws episodes of a few classes. Use `NearestCentroid` or `Finetuner` on a
pretrained network; `ProtoNet`, `NeighborhoodLearner` and `MAML` train on episodes.
`evaluate` and `compare` return accuracies with their intervals.
"""

from nsl_keras.few_shot.class_logits import ClassLogits as ClassLogits
from nsl_keras.few_shot.episodes import (
    Episode as Episode,
    EpisodeSampler as EpisodeSampler,
    select_classes as select_classes,
    split_classes as split_classes,
)
from nsl_keras.few_shot.evaluation import (
    Difference as Difference,
    Evaluation as Evaluation,
    compare as compare,
    evaluate as evaluate,
)
from nsl_keras.few_shot.finetuning import Finetuner as Finetuner
from nsl_keras.few_shot.maml import MAML as MAML
from nsl_keras.few_shot.neighborhood import NeighborhoodLearner as NeighborhoodLearner
from nsl_keras.few_shot.prototypical import (
    NearestCentroid as NearestCentroid,
    ProtoNet as ProtoNet,
)
from nsl_keras.few_shot.stateless import check_second_order as check_second_order
