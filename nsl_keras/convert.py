"""Public functions that add similarities or iFiLM to a model, fold it, or summarize it."""

from nsl_keras.neighborhoods.film import add_film
from nsl_keras.similarity.conversion import add_similarity
from nsl_keras.similarity.folding import fold
from nsl_keras.similarity.summary import summary

__all__ = ["add_film", "add_similarity", "fold", "summary"]
