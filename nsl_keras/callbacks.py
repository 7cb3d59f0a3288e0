"""Public callbacks."""

from nsl_keras.neighborhoods.callbacks import DictionaryInitializer, EntryStatistics
from nsl_keras.similarity.spectra import SimilaritySpectra
from nsl_keras.training.backup import TrainingBackup

__all__ = [
    "DictionaryInitializer",
    "EntryStatistics",
    "SimilaritySpectra",
    "TrainingBackup",
]
