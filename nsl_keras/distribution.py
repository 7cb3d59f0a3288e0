"""Public functions for training on several devices and machines."""

from nsl_keras.training.distribution import (
    DistributedModel,
    distribute,
    multi_worker_strategy,
)

__all__ = ["DistributedModel", "distribute", "multi_worker_strategy"]
