"""The callback that starts a dictionary from examples."""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.training import data


class DictionaryInitializer(keras.callbacks.Callback):
    """Calls `MetaNeighborhoodModel.initialize_from` before an epoch of `fit`.

    An optimizer with `use_ema=True` averages earlier entries in for a while.

    Args:
        x: See `initialize_from`.
        y: See `initialize_from`.
        epochs: int, the number of epochs to train first, less than those of `fit`. Resuming
            later, or calling `fit` again with the same callback, keeps the entries.
        seed: int of at least 0 or `None`, the seed of the draw.

    Raises:
        ValueError: For a negative `epochs` or `seed`; in `fit`, if `epochs` is not reached,
            and as `initialize_from`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=20)
    >>> model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> x, y = keras.random.normal((32, 8), seed=0), keras.ops.arange(32) % 3
    >>> start = nsl_keras.callbacks.DictionaryInitializer(x, y, epochs=1, seed=0)
    >>> history = model.fit(x, y, epochs=2, callbacks=[start], verbose=0)

    Reference:
        In Meta-Neighborhoods (Shan et al., NeurIPS 2020), entries start at random.
    """

    def __init__(
        self, x: Any, y: Any = None, epochs: int = 1, seed: int | None = None
    ) -> None:
        super().__init__()
        self.x, self.y = data.gather(x, y)
        self.epochs = validation.non_negative_integer(epochs, "epochs")
        self.seed = validation.optional(validation.non_negative_integer, seed, "seed")
        self._initialized: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        demand = f"less than the {self.params['epochs']} epochs of `fit`"
        fits = self._initialized is self.model or self.epochs < self.params["epochs"]
        validation.require(fits, "epochs", demand, self.epochs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epochs and self._initialized is not self.model:
            self.model.initialize_from(self.x, self.y, seed=self.seed, verbose=0)
            self._initialized = self.model
