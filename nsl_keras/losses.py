"""Public losses."""

from nsl_keras.similarity.losses import SmoothedCrossentropy

__all__ = ["SmoothedCrossentropy"]
