"""Stops training at the first loss that is not a number."""

from __future__ import annotations

import math
from typing import Any

import keras


class NonFiniteLossError(ArithmeticError):
    """The training loss became NaN or infinite.

    XLA and JAX cannot check data inside a step, so that bad inputs or a diverging run
    show first in the loss. `fit` raises this error after the batch where it happens.

    Example:

    >>> import nsl_keras
    >>> raise nsl_keras.NonFiniteLossError("The loss became nan in batch 3 of epoch 1.")
    Traceback (most recent call last):
        ...
    nsl_keras.neighborhoods.non_finite_loss.NonFiniteLossError: The loss became nan ...
    """


class StopAtNonFiniteLoss(keras.callbacks.Callback):
    """Raises `NonFiniteLossError` after a batch that leaves the loss non-finite."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    @classmethod
    def added_to(cls, callbacks: Any) -> Any:
        """Returns the callbacks given to `fit`, in any form it takes, and this one."""
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.append(cls())
            return callbacks
        return [*keras.tree.flatten(callbacks or []), cls()]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        loss = (logs or {}).get("loss")
        if loss is not None and not math.isfinite(float(loss)):
            raise NonFiniteLossError(
                f"The loss became {float(loss)} in batch {batch + 1} of epoch "
                f"{self.epoch + 1}. Check the inputs for NaN and infinities, and the "
                "labels for numbers outside the classes, or lower the learning rate."
            )
