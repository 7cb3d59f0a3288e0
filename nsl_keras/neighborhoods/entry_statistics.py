"""How a dictionary is used: attention to each entry, its spread, and entries left alone."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from nsl_keras import validation
from nsl_keras.neighborhoods import inspection
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel

#: Examples whose attention is held at once.
_BATCH_SIZE = 128


class EntryStatistics(keras.callbacks.Callback):
    """Logs, after each epoch, how the dictionary of neighbours is used on some examples.

    With `w_j(x)` the attention weights, without dropout, and `u_j` their mean over the
    examples, the logs of the epoch gain

        attention_entropy    mean over x of  - sum_j w_j(x) log w_j(x)
        usage_entropy        - sum_j u_j log u_j
        dead_entries         share of the entries with  u_j < dead_below / S

    Both entropies are in nats, between 0 and `log(S)`: `exp(attention_entropy)` entries
    are looked at for an example, `exp(usage_entropy)` by all examples together. A low
    attention entropy with a high usage entropy is a dictionary that tells examples apart.
    Where many entries are dead, a smaller dictionary, a higher temperature or more
    dictionary dropout may serve as well.

    The names appear in `History` and for callbacks that come later in the list
    (`CSVLogger`, `TensorBoard`, `EarlyStopping`). An epoch takes one forward pass of the
    backbone more on the given examples: some hundreds are enough.

    Args:
        x: Array of inputs, for example a part of the validation data.
        dead_below: float above 0, the usage, in parts of the mean usage `1 / S`, below
            which an entry is dead.

    Attributes:
        usage: NumPy array of shape `(num_neighbors,)`, the `u_j` after the last epoch;
            `None` before the first.

    Raises:
        ValueError: For an empty `x`, NaN and infinities in it, and a `dead_below` outside
            the range above; in `fit`, if the model is no `MetaNeighborhoodModel`.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     nsl_keras.layers.CosineDense(3), num_neighbors=20)
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
        self.x = np.asarray(x)
        validation.finite(self.x, "x")
        if not len(self.x):
            raise ValueError(
                f"`x` must hold at least one example. Received: x of shape {self.x.shape}"
            )
        self.dead_below = validation.positive_number(dead_below, "dead_below")
        self.usage: np.ndarray | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        if not isinstance(self.model, MetaNeighborhoodModel):
            raise ValueError(
                "`EntryStatistics` must be a callback of a MetaNeighborhoodModel. "
                f"Received: a {type(self.model).__name__}"
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(self.measure())

    def measure(self) -> dict[str, float]:
        """Returns the statistics of the model as it is, and sets `usage`."""
        model = self.model
        usage = np.zeros(model.neighborhood.num_neighbors)
        entropy = 0.0
        for start in range(0, len(self.x), _BATCH_SIZE):
            part = inspection.attention_of(model, self.x[start : start + _BATCH_SIZE])
            weights = part.astype("float64")
            usage += weights.sum(axis=0) / len(self.x)
            entropy += _entropy(weights) / len(self.x)
        self.usage = usage
        return {
            "attention_entropy": entropy,
            "usage_entropy": _entropy(usage),
            "dead_entries": float(np.mean(usage < self.dead_below / len(usage))),
        }


def _entropy(weights: np.ndarray) -> float:
    """Entropy in nats; those of several rows summed."""
    return float(-np.sum(weights * np.log(np.where(weights > 0, weights, 1.0))))
