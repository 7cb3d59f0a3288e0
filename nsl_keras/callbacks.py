"""Public callbacks."""

from nsl_keras.neighborhoods.projector import NeighborProjector

__all__ = ["NeighborProjector"]
