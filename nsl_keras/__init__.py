"""Neural Similarity Learning and Meta-Neighborhoods for Keras 3.

* `layers`: convolutions, dense and recurrent layers with a learned similarity, and the
  parts of Meta-Neighborhoods. `similarities` and `predictors` are their arguments.
* `MetaNeighborhoodModel`: backbone, head and dictionary of neighbors, trained with `fit`.
* `convert`: adds similarities or iFiLM to a trained network, and folds static similarities
  into plain Keras layers.
* `few_shot`: episodes, MAML, finetuning, metric learners, evaluation.
* `backbones`: three networks of the papers.
* `callbacks`: resume a killed training run; start the dictionary from examples.
* `export`: SavedModels that need neither this package nor Keras.
* `visualize`: pictures of similarities, neighbors and predictions.
* `key_metrics`, `regularizers`: how near a query is to a key, and a penalty on `M`.

Models save and load like Keras's own, in a process that has imported nsl_keras. README.md
shows a first program; docs/papers.md lists where this package differs from the papers.
"""

# The backend is checked before anything else imports Keras.
from nsl_keras import backend as backend  # isort: split

from nsl_keras import (
    backbones,
    callbacks,
    convert,
    export,
    few_shot,
    key_metrics,
    layers,
    predictors,
    regularizers,
    similarities,
    visualize,
)
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.training.checks import NonFiniteLossError
from nsl_keras.version import __version__

__all__ = [
    "MetaNeighborhoodModel",
    "NonFiniteLossError",
    "__version__",
    "backbones",
    "callbacks",
    "convert",
    "export",
    "few_shot",
    "key_metrics",
    "layers",
    "predictors",
    "regularizers",
    "similarities",
    "visualize",
]


def __dir__() -> list[str]:
    return __all__
