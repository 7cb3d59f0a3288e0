"""Public functions that convert a model, or describe it."""

from nsl_keras.neighborhoods.film import add_film as add_film
from nsl_keras.nesting import unfreeze as unfreeze
from nsl_keras.normalization import convert_batch_norms as convert_batch_norms
from nsl_keras.similarity.conversion import add_similarity as add_similarity
from nsl_keras.similarity.folding import fold as fold
from nsl_keras.similarity.summary import summary as summary
from nsl_keras.similarity.tasks import load_task as load_task, save_task as save_task
