"""Public callbacks."""

from nsl_keras.neighborhoods.callbacks import DictionaryInitializer
from nsl_keras.training.backup import TrainingBackup

__all__ = ["DictionaryInitializer", "TrainingBackup"]
