"""Public callbacks."""

from nsl_keras.neighborhoods.callbacks import (
    DictionaryInitializer,
    EntryStatistics,
    NeighborProjector,
)

__all__ = ["DictionaryInitializer", "EntryStatistics", "NeighborProjector"]
