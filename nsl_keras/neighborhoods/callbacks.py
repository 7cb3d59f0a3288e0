"""Callbacks: a dictionary's start, its use, and its keys for TensorBoard's projector."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from nsl_keras import data, validation
from nsl_keras.neighborhoods import explain
from nsl_keras.neighborhoods.dictionary import require_same_length
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.training import files
from nsl_keras.training.backup import require_before_backup

_CONFIG = """embeddings {
  tensor_name: "neighbors"
  tensor_path: "neighbors.tsv"
  metadata_path: "neighbors_metadata.tsv"
}
"""


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
    (`CSVLogger`, `TensorBoard`, `EarlyStopping`, `TrainingBackup`). An epoch takes
    one forward pass of the backbone more on the given examples: some hundreds are enough.

    Args:
        x: Inputs, for example a part of the validation data: an array, several as the
            model takes them, or a data set as for `predict`, which is read once and must
            end.
        dead_below: float above 0, the usage, in parts of the mean usage `1 / S`, below
            which an entry is dead.

    Attributes:
        usage: NumPy array of shape `(num_neighbors,)`, the `u_j` after the last epoch;
            `None` before the first.

    Raises:
        ValueError: For an empty `x`, NaN and infinities in it, and a `dead_below` outside
            the range above; in `fit`, if the model is no `MetaNeighborhoodModel`, or if a
            `TrainingBackup` comes before.

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
        self.x, _ = data.gathered(x)
        for leaf in tree.flatten(self.x):
            validation.finite(leaf, "x")
        if not data.length_of(self.x):
            shapes = ", ".join(str(leaf.shape) for leaf in tree.flatten(self.x))
            raise ValueError(
                f"`x` must hold at least one example. Received: x of shape {shapes}"
            )
        self.dead_below = validation.positive_number(dead_below, "dead_below")
        self.usage: np.ndarray | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        _require_model(self)
        require_before_backup(self)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs.update(self.measure())

    def measure(self) -> dict[str, float]:
        """Returns the statistics of the model as it is, and sets `usage`."""
        model = self.model
        usage = np.zeros(model.num_neighbors)
        entropy = 0.0
        examples = data.length_of(self.x)
        for batch, _ in data.batches(self.x):
            weights = explain.attention_of(model, batch).astype("float64")
            usage += weights.sum(axis=0) / examples
            entropy += _entropy(weights) / examples
        self.usage = usage
        return {
            "attention_entropy": entropy,
            "usage_entropy": _entropy(usage),
            "dead_entries": float(np.mean(usage < self.dead_below / len(usage))),
        }


class DictionaryInitializer(keras.callbacks.Callback):
    """Sets a dictionary's entries to training examples, after the first epochs of `fit`.

    Keys become features of examples, at the features' own scale, and values their labels:
    `MetaNeighborhoodModel.initialize_from`, at the moment when the backbone's features mean
    something. Entries and inner rates are trained from there. An optimizer that averages
    weights (`use_ema=True`) averages the entries before with those after: train some
    hundred steps from here, or its average holds little of the examples.

    Args:
        x: Inputs, of at least as many examples as there are entries: an array, several as
            the model takes them, or a data set as for `fit`, which is read once and must
            end.
        y: Array of labels or targets, as for `fit`; `None` where a data set has them.
        epochs: int, the number of epochs before; 0 for the start of training. Training
            that is resumed later keeps its entries, and so does the same callback in a
            second `fit` of the model.
        seed: int of at least 0 or `None`, the seed of the draw.

    Raises:
        ValueError: For `x` and `y` of different lengths, a negative `epochs` and a `seed`
            that is no seed; when `fit` begins, if the model is no
            `MetaNeighborhoodModel` or has more entries than there are examples, or if a
            `TrainingBackup` comes before; later, for what else `initialize_from` refuses.

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
        self.x, self.y = data.gathered(x, y)
        data.require_targets(self.y)
        require_same_length(range(data.length_of(self.x)), self.y, "x")
        self.epochs = validation.non_negative_integer(epochs, "epochs")
        self.seed = validation.optional(validation.non_negative_integer, seed, "seed")
        self._initialized: MetaNeighborhoodModel | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        _require_model(self)
        require_before_backup(self)
        # Now, not after an epoch of training.
        examples, entries = data.length_of(self.x), self.model.num_neighbors
        if examples < entries:
            raise ValueError(
                "`x` must have at least as many examples as the dictionary has entries. "
                f"Received: {examples} examples and {entries} entries"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # Not when training begins: a resumed one has trained entries.
        if epoch == self.epochs == 0:
            self._initialize()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch + 1 == self.epochs:
            self._initialize()

    def _initialize(self) -> None:
        if self._initialized is not self.model:
            self.model.initialize_from(self.x, self.y, seed=self.seed, verbose=0)
            self._initialized = self.model


class NeighborProjector(keras.callbacks.Callback):
    """Writes a dictionary's keys for TensorBoard's Embedding Projector, after each epoch.

    Three files in the log folder, replaced after every epoch of `fit`: `neighbors.tsv`,
    the keys, below them the features of examples if there are any, a row each;
    `neighbors_metadata.tsv`, what each row is, with the columns

        kind          entry or example
        number        of the entry, or of the example in `x`
        class         most probable class of the entry's value; the example's label
        probability   of that class; 1 for an example

    (in a regression `value` in place of the last two); and `projector_config.pbtxt`,
    which names both. Show them with `tensorboard --logdir=LOG_DIR`. The folder may be that
    of `keras.callbacks.TensorBoard`, but not with its `embeddings_freq`, which writes a
    `projector_config.pbtxt` of its own. Writing needs no other package; looking, and
    `keras.callbacks.TensorBoard`, need `pip install "nsl_keras[tensorboard]"`.

    Args:
        log_dir: Folder to write to; made if missing.
        x: Inputs whose features are shown among the keys: an array, several as the model
            takes them, or a data set as for `fit`, which is read once and must end; or
            `None`.
        y: Their labels or targets, as for `fit`; with `x`, unless a data set has them.
        class_names: Names of the classes; `None` numbers them.

    Raises:
        ValueError: If only one of `x` and `y` is given or their lengths differ; in `fit`,
            if the model is no `MetaNeighborhoodModel`, for labels that do not fit, or for
            another number of names than classes.

    Example:

    >>> import pathlib, tempfile
    >>> import keras
    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     None, nsl_keras.layers.CosineDense(3), dictionary=12)
    >>> model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    >>> x = np.random.default_rng(0).normal(size=(30, 6)).astype("float32")
    >>> y = np.arange(30) % 3
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     projector = nsl_keras.callbacks.NeighborProjector(folder, x, y)
    ...     history = model.fit(x, y, verbose=0, callbacks=[projector])
    ...     sorted(path.name for path in pathlib.Path(folder).iterdir())
    ['neighbors.tsv', 'neighbors_metadata.tsv', 'projector_config.pbtxt']

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 4.2: Figure 5 shows keys
        among the features of training examples.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        x: Any = None,
        y: Any = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if x is not None:
            x, y = data.gathered(x, y)
        if (x is None) != (y is None):
            raise ValueError(
                "`x` and `y` must be given together, or neither. Received: "
                f"`{'y' if x is None else 'x'}` alone"
            )
        if x is not None:
            require_same_length(range(data.length_of(x)), y, "x")
        self.log_dir = pathlib.Path(log_dir).expanduser()
        self.x = x
        self.y = y
        self.class_names = class_names

    def on_train_begin(self, logs: Any = None) -> None:
        _require_model(self)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.write()

    def write(self) -> None:
        """Writes the three files for the model as it is."""
        dictionary = self.model.dictionary
        rows = [ops.convert_to_numpy(dictionary.keys.value)]
        header, lines = self._entries(ops.convert_to_numpy(dictionary.values))
        if self.x is not None:
            rows.append(explain.features_of(self.model, self.x))
            lines += self._examples(dictionary.num_values)
        table = "".join(
            "\t".join(f"{value:.7g}" for value in row) + "\n"
            for row in np.concatenate(rows)
        )
        metadata = "\n".join([header, *lines]) + "\n"
        # Whole at every moment, for a TensorBoard that reads them.
        files.write_text(self.log_dir / "neighbors.tsv", table)
        files.write_text(self.log_dir / "neighbors_metadata.tsv", metadata)
        files.write_text(self.log_dir / "projector_config.pbtxt", _CONFIG)

    def _entries(self, values: np.ndarray) -> tuple[str, list[str]]:
        """The header of the metadata, and the line of each entry."""
        if self.model.task == "regression":
            return "kind\tnumber\tvalue", [
                f"entry\t{number}\t{_numbers(value)}" for number, value in enumerate(values)
            ]
        names = self._names(values.shape[1])
        return "kind\tnumber\tclass\tprobability", [
            f"entry\t{number}\t{names[value.argmax()]}\t{value.max():.3f}"
            for number, value in enumerate(values)
        ]

    def _examples(self, num_values: int) -> list[str]:
        """The line of each example."""
        if self.model.task == "regression":
            validation.targets(self.y, num_values)
            return [
                f"example\t{number}\t{_numbers(target)}"
                for number, target in enumerate(self.y)
            ]
        labels = explain.class_numbers(self.y, num_values)
        names = self._names(num_values)
        return [
            f"example\t{number}\t{names[label]}\t1" for number, label in enumerate(labels)
        ]

    def _names(self, classes: int) -> list[str]:
        # A tab or a line's end would open another column or row.
        names = explain.names_of(classes, self.class_names)
        return [" ".join(name.split()) for name in names]


def _require_model(callback: keras.callbacks.Callback) -> None:
    if not isinstance(callback.model, MetaNeighborhoodModel):
        raise ValueError(
            f"`{type(callback).__name__}` must be a callback of a MetaNeighborhoodModel. "
            f"Received: a {type(callback.model).__name__}"
        )


def _entropy(weights: np.ndarray) -> float:
    """Entropy in nats; those of several rows summed."""
    return float(-np.sum(weights * np.log(np.where(weights > 0, weights, 1.0))))


def _numbers(value: np.ndarray) -> str:
    return " ".join(f"{number:.4g}" for number in np.reshape(value, -1))
