"""Neural Similarity Learning and Meta-Neighborhoods for Keras 3."""

# The backend is checked before anything else imports Keras.
from nsl_keras import backend as backend  # isort: split

from nsl_keras import backbones as backbones
from nsl_keras import callbacks as callbacks
from nsl_keras import convert as convert
from nsl_keras import distribution as distribution
from nsl_keras import export as export
from nsl_keras import few_shot as few_shot
from nsl_keras import key_metrics as key_metrics
from nsl_keras import layers as layers
from nsl_keras import losses as losses
from nsl_keras import predictors as predictors
from nsl_keras import regularizers as regularizers
from nsl_keras import similarities as similarities
from nsl_keras import visualize as visualize
from nsl_keras.neighborhoods.model import (
    MetaNeighborhoodModel as MetaNeighborhoodModel,
)
from nsl_keras.training import NonFiniteLossError as NonFiniteLossError
from nsl_keras.version import __version__ as __version__
