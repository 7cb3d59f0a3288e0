"""The dictionary in TensorBoard's Embedding Projector, written without TensorBoard."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.neighborhoods import initialization, inspection
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel

_CONFIG = """embeddings {
  tensor_name: "neighbors"
  tensor_path: "neighbors.tsv"
  metadata_path: "neighbors_metadata.tsv"
}
"""


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
    `projector_config.pbtxt` of its own. Neither writing nor JAX needs the tensorboard
    package.

    Args:
        log_dir: Folder to write to; made if missing.
        x: Array of inputs whose features are shown among the keys, or `None`.
        y: Their labels or targets, as for `fit`; with `x`.
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
    ...     nsl_keras.layers.CosineDense(3), num_neighbors=12)
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
        if (x is None) != (y is None):
            raise ValueError(
                "`x` and `y` must be given together, or neither. Received: "
                f"`{'y' if x is None else 'x'}` alone"
            )
        if x is not None:
            x, y = np.asarray(x), np.asarray(y)
            initialization.require_same_length(x, y, "x")
        self.log_dir = pathlib.Path(log_dir).expanduser()
        self.x = x
        self.y = y
        self.class_names = class_names

    def on_train_begin(self, logs: Any = None) -> None:
        if not isinstance(self.model, MetaNeighborhoodModel):
            raise ValueError(
                "`NeighborProjector` must be a callback of a MetaNeighborhoodModel. "
                f"Received: a {type(self.model).__name__}"
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.write()

    def write(self) -> None:
        """Writes the three files for the model as it is."""
        dictionary = self.model.neighborhood.dictionary
        rows = [ops.convert_to_numpy(dictionary.keys.value)]
        header, lines = self._entries(ops.convert_to_numpy(dictionary.values))
        if self.x is not None:
            rows.append(inspection.features_of(self.model, self.x))
            lines += self._examples(dictionary.num_values)
        self.log_dir.mkdir(parents=True, exist_ok=True)
        table = "".join(
            "\t".join(f"{value:.7g}" for value in row) + "\n"
            for row in np.concatenate(rows)
        )
        self._replace("neighbors.tsv", table)
        self._replace("neighbors_metadata.tsv", "\n".join([header, *lines]) + "\n")
        self._replace("projector_config.pbtxt", _CONFIG)

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
        labels = inspection.class_numbers(self.y, num_values)
        names = self._names(num_values)
        return [
            f"example\t{number}\t{names[label]}\t1" for number, label in enumerate(labels)
        ]

    def _names(self, classes: int) -> list[str]:
        # A tab or a line's end would open another column or row.
        names = inspection.names_of(classes, self.class_names)
        return [" ".join(name.split()) for name in names]

    def _replace(self, name: str, text: str) -> None:
        """Writes a file that is whole at every moment, for a TensorBoard that reads it."""
        scratch = self.log_dir / f".{name}.{os.getpid()}"
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(self.log_dir / name)


def _numbers(value: np.ndarray) -> str:
    return " ".join(f"{number:.4g}" for number in np.reshape(value, -1))
