"""The callback that starts a dictionary from examples."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.training import data


class DictionaryInitializer(keras.callbacks.Callback):
    """Sets a dictionary's entries to training examples, before an epoch of `fit`.

    The callback calls `MetaNeighborhoodModel.initialize_from`, and training continues from
    these entries. If `fit` ends before that epoch, the entries stay as they are and a
    warning says so. An optimizer that averages weights (`use_ema=True`) mixes the earlier
    entries into its average, so train a few hundred more steps afterwards.

    Args:
        x: Inputs, as for `fit`, with at least as many examples as entries. A data set is
            read once, so it must be finite.
        y: Array of labels or targets; `None` if a data set yields them.
        epochs: int, the number of epochs to train first; 0 for the start of training. If
            training is resumed later, or `fit` is called again with the same callback, the
            entries stay.
        seed: int of at least 0 or `None`, the seed of the draw.

    Raises:
        ValueError: For a negative `epochs` or `seed`; in `fit`, if the model is not a
            `MetaNeighborhoodModel`, and as `MetaNeighborhoodModel.initialize_from`.

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
        self._initialized: MetaNeighborhoodModel | None = None
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if not isinstance(self.model, MetaNeighborhoodModel):
            raise ValueError(
                "`DictionaryInitializer` must be a callback of a MetaNeighborhoodModel. "
                f"Received: a {type(self.model).__name__}"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        if epoch == self.epochs and self._initialized is not self.model:
            self.model.initialize_from(self.x, self.y, seed=self.seed, verbose=0)
            self._initialized = self.model

    def on_train_end(self, logs: Any = None) -> None:
        if self._epoch < self.epochs:
            warnings.warn(
                "`DictionaryInitializer` did not set the entries, because training ended "
                f"before epoch {self.epochs}, counted from 0.",
                stacklevel=2,
            )
