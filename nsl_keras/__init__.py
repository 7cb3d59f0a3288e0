"""Neural Similarity Learning and Meta-Neighborhoods for Keras 3.

A map of the package, by what you want to do:

    a trained network at hand
        convert.add_similarity      its convolutions get a learned or predicted similarity
        convert.add_film            its feature maps are modulated by instance
        convert.fold                back to plain Keras layers, with the same outputs
        convert.summary             what was converted, and what it costs
        MetaNeighborhoodModel.from_classifier
                                    its head is finetuned on learned neighbours
    a network of your own
        layers                      convolutions, dense and recurrent layers with a
                                    similarity, and the parts of Meta-Neighborhoods
        similarities, predictors    what the similarity matrix M may be, what predicts it
        MetaNeighborhoodModel       backbone, head and dictionary, trained with `fit`
        key_metrics                 what makes an entry of the dictionary near
        losses, regularizers        of spherical layers
        callbacks                   training that may be killed; how the dictionary is used,
                                    and where it starts
        backbones                   the networks of the papers
    few images a class
        few_shot                    episodes, MAML, finetuning, prototypes, evaluation
    what was learned
        visualize                   pictures of similarities, neighbours and predictions
    in use
        distribution                `fit` on several devices and machines
        export                      a SavedModel that needs neither this package nor Keras

`help` on any of these names says more: `help(nsl_keras.convert.fold)`. Models save and load
as Keras's own do, in a process that has imported nsl_keras. README.md has a first program,
and docs/papers.md says where the two papers and this package differ.
"""

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
from nsl_keras.training.checks import NonFiniteLossError as NonFiniteLossError
from nsl_keras.version import __version__ as __version__
