"""Public callbacks."""

from nsl_keras.neighborhoods.callbacks import (
    DictionaryInitializer,
    EntryStatistics,
    NeighborProjector,
)
from nsl_keras.training.backup import TrainingBackup

__all__ = [
    "DictionaryInitializer",
    "EntryStatistics",
    "NeighborProjector",
    "TrainingBackup",
]
