"""Neural Similarity Learning and Meta-Neighborhoods for Keras 3.

* `layers`: convolutions, dense and recurrent layers with a learned similarity, and the
  parts of Meta-Neighborhoods. `similarities` and `predictors` are their arguments.
* `MetaNeighborhoodModel`: backbone, head and dictionary of neighbors, trained with `fit`.
* `convert`: adds similarities or iFiLM to a trained network, and folds static similarities
  into plain Keras layers.
* `few_shot`: episodes, MAML, finetuning, metric learners, evaluation.
* `backbones`: three networks of the papers.
* `callbacks`: resume a killed training run; start and watch the dictionary.
* `export`: SavedModels that need neither this package nor Keras.
* `visualize`: pictures of similarities, neighbors and predictions.
* `key_metrics`, `regularizers`: how near a query is to a key, and a penalty on `M`.

Models save and load like Keras's own, in a process that has imported nsl_keras. README.md
shows a first program; docs/papers.md lists where this package differs from the papers.
"""

# The backend is checked before anything else imports Keras.
from nsl_keras import backend as backend  # isort: split

from nsl_keras import backbones as backbones
from nsl_keras import callbacks as callbacks
from nsl_keras import convert as convert
from nsl_keras import export as export
from nsl_keras import few_shot as few_shot
from nsl_keras import key_metrics as key_metrics
from nsl_keras import layers as layers
from nsl_keras import predictors as predictors
from nsl_keras import regularizers as regularizers
from nsl_keras import similarities as similarities
from nsl_keras import visualize as visualize
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel as MetaNeighborhoodModel
from nsl_keras.training.checks import NonFiniteLossError as NonFiniteLossError
from nsl_keras.version import __version__ as __version__

# `dir` shows what is public.
for _module in (
    *(backbones, callbacks, convert, export, few_shot, key_metrics),
    *(layers, predictors, regularizers, similarities, visualize),
):
    if hasattr(_module, "__all__"):
        vars(_module)["__dir__"] = _module.__all__.copy
