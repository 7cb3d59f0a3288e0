"""Callbacks that start a dictionary from examples, and log how it is used."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
from keras import tree

from nsl_keras import validation
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.training import data

#: The share of the mean usage below which an entry is dead.
DEAD_BELOW = 0.1


class _NeighborhoodCallback(keras.callbacks.Callback):
    """Base of the callbacks of a `MetaNeighborhoodModel`."""

    def on_train_begin(self, logs: Any = None) -> None:
        if not isinstance(self.model, MetaNeighborhoodModel):
            raise ValueError(
                f"`{type(self).__name__}` must be a callback of a MetaNeighborhoodModel. "
                f"Received: a {type(self.model).__name__}"
            )


class EntryStatistics(_NeighborhoodCallback):
    """Logs, after each epoch, how the dictionary of neighbors is used on some examples.

    From the attention weights `w_j(x)`, without dropout, and their mean `u_j` over the
    examples, the callback adds to the epoch's logs

        attention_entropy    mean over x of  - sum_j w_j(x) log w_j(x)
        usage_entropy        - sum_j u_j log u_j
        dead_entries         share of the entries with  u_j < 0.1 / S

    Entropies are in nats, between 0 and `log(S)`. One example attends to about
    `exp(attention_entropy)` entries, all examples together to `exp(usage_entropy)`. If many
    entries are dead, try a smaller dictionary, a higher temperature or more dropout.

    The logs reach `History` and the callbacks that follow this one in the list.

    Args:
        x: Inputs, as for `predict`, for example a part of the validation data. A data set
            is read once, so it must be finite.

    Attributes:
        usage: NumPy array of shape `(num_neighbors,)`, the `u_j` after the last epoch;
            `None` before the first epoch.

    Raises:
        ValueError: For NaN and infinities in `x`; in `fit`, if the model is not a
            `MetaNeighborhoodModel`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=20)
    >>> model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> x, y = keras.random.normal((32, 8), seed=0), keras.ops.arange(32) % 3
    >>> statistics = nsl_keras.callbacks.EntryStatistics(x)
    >>> history = model.fit(x, y, callbacks=[statistics], verbose=0)
    >>> sorted(history.history)
    ['attention_entropy', 'dead_entries', 'loss', 'usage_entropy']

    Reference:
        The weights: Meta-Neighborhoods (Shan et al., NeurIPS 2020), Eq. (5).
    """

    def __init__(self, x: Any) -> None:
        super().__init__()
        self.x, _ = data.gather(x)
        for leaf in tree.flatten(self.x):
            validation.finite(leaf, "x")
        self.usage: np.ndarray | None = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(self.measure())

    def measure(self) -> dict[str, float]:
        """Returns the statistics of the current model, and sets `usage`."""
        model = self.model
        weights = data.predict(
            lambda batch: model.dictionary.attention(model.features(batch)), model, self.x
        ).astype("float64")
        self.usage = weights.mean(axis=0)
        return {
            "attention_entropy": float(np.mean(_entropy(weights))),
            "usage_entropy": float(_entropy(self.usage)),
            "dead_entries": float(np.mean(self.usage < DEAD_BELOW / len(self.usage))),
        }


class DictionaryInitializer(_NeighborhoodCallback):
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
        ValueError: For a negative `epochs` or `seed`, and for the reasons that
            `EntryStatistics` and `MetaNeighborhoodModel.initialize_from` name.

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


def _entropy(weights: np.ndarray) -> np.ndarray:
    """Returns the entropy of each row, in nats."""
    return -np.sum(weights * np.log(np.where(weights > 0, weights, 1.0)), axis=-1)
