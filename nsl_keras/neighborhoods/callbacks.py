"""Callbacks that start a dictionary from examples, and log how it is used."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import tree

from nsl_keras import validation
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.training import data
from nsl_keras.training.backup import require_before_backup


class EntryStatistics(keras.callbacks.Callback):
    """Logs, after each epoch, how the dictionary of neighbours is used on some examples.

    With `w_j(x)` the attention weights, without dropout, and `u_j` their mean over the
    examples, the epoch's logs gain

        attention_entropy    mean over x of  - sum_j w_j(x) log w_j(x)
        usage_entropy        - sum_j u_j log u_j
        dead_entries         share of the entries with  u_j < dead_below / S

    Both entropies are in nats, between 0 and `log(S)`: each example looks at
    `exp(attention_entropy)` entries, all examples together look at `exp(usage_entropy)`. A
    dictionary that distinguishes examples has a low attention entropy and a high usage
    entropy. If many entries are dead, try a smaller dictionary, a higher temperature or
    more dictionary dropout.

    The names appear in `History` and for later callbacks in the list (`CSVLogger`,
    `TensorBoard`, `EarlyStopping`, `TrainingBackup`). Each epoch takes one more forward
    pass of the backbone over the given examples: some hundreds are enough.

    Args:
        x: Inputs, for example a part of the validation data, as for `predict`; a data set
            is read once, so it must be finite.
        dead_below: float above 0. An entry is dead if its usage is less than `dead_below`
            times the mean usage `1 / S`.

    Attributes:
        usage: NumPy array of shape `(num_neighbors,)`, the `u_j` after the last epoch;
            `None` before the first.

    Raises:
        ValueError: For NaN and infinities in `x`, and for a `dead_below` that is not above
            0; in `fit`, if the model is not a `MetaNeighborhoodModel`, or if a
            `TrainingBackup` precedes this callback.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=20)
    >>> model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    >>> statistics = nsl_keras.callbacks.EntryStatistics(x)
    >>> history = model.fit(x, np.arange(32) % 3, callbacks=[statistics], verbose=0)
    >>> sorted(history.history)
    ['attention_entropy', 'dead_entries', 'loss', 'usage_entropy']
    >>> statistics.usage.shape
    (20,)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.1, Eq. (1), for the
        weights. The statistics are this package's.
    """

    def __init__(self, x: Any, dead_below: float = 0.1) -> None:
        super().__init__()
        self.x, _ = data.gather(x)
        for leaf in tree.flatten(self.x):
            validation.finite(leaf, "x")
        self.dead_below = validation.positive_number(dead_below, "dead_below")
        self.usage: np.ndarray | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        _require_model(self)
        require_before_backup(self)

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
            "dead_entries": float(np.mean(self.usage < self.dead_below / len(self.usage))),
        }


class DictionaryInitializer(keras.callbacks.Callback):
    """Sets a dictionary's entries to training examples, after the first epochs of `fit`.

    It calls `MetaNeighborhoodModel.initialize_from` once the backbone's features are
    meaningful. Entries and inner rates are trained from there. An optimizer that averages
    weights (`use_ema=True`) mixes the earlier entries into its average: train some hundred
    steps after this callback.

    Args:
        x: Inputs, at least as many examples as there are entries, as for `fit`; a data set
            is read once, so it must be finite.
        y: Array of labels or targets; `None` if a data set yields them.
        epochs: int, the number of epochs before; 0 for the start of training. Training
            that is resumed later keeps its entries, and so does a second `fit` of the
            model with the same callback.
        seed: int of at least 0 or `None`, the seed of the draw.

    Raises:
        ValueError: For a negative `epochs` or `seed`; in `fit`, if the model is not a
            `MetaNeighborhoodModel`, or if a `TrainingBackup` precedes this callback; and
            as `initialize_from`.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=20)
    >>> model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> x = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    >>> y = np.arange(32) % 3
    >>> start = nsl_keras.callbacks.DictionaryInitializer(x, y, epochs=1, seed=0)
    >>> history = model.fit(x, y, epochs=2, callbacks=[start], verbose=0)

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.1, learns the entries from
        a random start; a start from examples is this package's.
    """

    def __init__(
        self, x: Any, y: Any = None, epochs: int = 1, seed: int | None = None
    ) -> None:
        super().__init__()
        self.x, self.y = data.gather(x, y)
        self.epochs = validation.non_negative_integer(epochs, "epochs")
        self.seed = validation.optional(validation.non_negative_integer, seed, "seed")
        self._initialized: MetaNeighborhoodModel | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        _require_model(self)
        require_before_backup(self)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # Not in `on_train_begin`: resumed training has trained entries.
        if epoch == self.epochs == 0:
            self._initialize()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch + 1 == self.epochs:
            self._initialize()

    def _initialize(self) -> None:
        if self._initialized is not self.model:
            self.model.initialize_from(self.x, self.y, seed=self.seed, verbose=0)
            self._initialized = self.model


def _require_model(callback: keras.callbacks.Callback) -> None:
    if not isinstance(callback.model, MetaNeighborhoodModel):
        raise ValueError(
            f"`{type(callback).__name__}` must be a callback of a MetaNeighborhoodModel. "
            f"Received: a {type(callback.model).__name__}"
        )


def _entropy(weights: np.ndarray) -> np.ndarray:
    """Returns the entropy of each row, in nats."""
    return -np.sum(weights * np.log(np.where(weights > 0, weights, 1.0)), axis=-1)
