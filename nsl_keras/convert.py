"""Public functions that convert a model, or describe it."""

from nsl_keras.neighborhoods.film import add_film
from nsl_keras.nesting import unfreeze
from nsl_keras.normalization import convert_batch_norms
from nsl_keras.similarity.conversion import add_similarity
from nsl_keras.similarity.folding import fold
from nsl_keras.similarity.summary import summary
from nsl_keras.similarity.tasks import load_task, save_task

__all__ = [
    "add_film",
    "add_similarity",
    "convert_batch_norms",
    "fold",
    "load_task",
    "save_task",
    "summary",
    "unfreeze",
]
