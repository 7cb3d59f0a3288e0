"""Public callbacks."""

from nsl_keras.neighborhoods.callbacks import DictionaryInitializer as DictionaryInitializer
from nsl_keras.training.backup import TrainingBackup as TrainingBackup
