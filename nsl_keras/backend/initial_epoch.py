"""Where a running `fit` begins: Keras has no public way to change it."""

from __future__ import annotations

import keras


def begin_fit_at(model: keras.Model, epoch: int) -> None:
    """Lets the `fit` that called `on_train_begin` begin at another epoch.

    `keras.callbacks.BackupAndRestore` sets the same attribute. Keras never takes it back,
    so that later calls of `fit` begin there too: call again with 0 once `fit` has begun.

    Args:
        model: The model in training.
        epoch: The number of the epoch, from 0; 0 for what `fit` was given.
    """
    model._initial_epoch = epoch
