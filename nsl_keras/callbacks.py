"""Public callbacks."""

from nsl_keras.neighborhoods.entry_statistics import EntryStatistics
from nsl_keras.neighborhoods.projector import NeighborProjector

__all__ = ["EntryStatistics", "NeighborProjector"]
