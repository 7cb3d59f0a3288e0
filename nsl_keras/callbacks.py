"""Public callbacks."""

from nsl_keras.neighborhoods.callbacks import EntryStatistics, NeighborProjector

__all__ = ["EntryStatistics", "NeighborProjector"]
