"""Public regularizers."""

from nsl_keras.similarity.regularizers import OrthogonalityRegularizer

__all__ = ["OrthogonalityRegularizer"]
