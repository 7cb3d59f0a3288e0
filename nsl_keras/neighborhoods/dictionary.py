"""The dictionary of induced neighbours: keys, values, attention over them, and starts."""

from __future__ import annotations

import functools
import math
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.neighborhoods import key_metrics
from nsl_keras.neighborhoods.inner_loop import LOSSES, Entries
from nsl_keras.neighborhoods.key_metrics import KeyMetric

#: Multipliers stay small enough for products of two indices to fit an int32.
_LARGEST_PRODUCT = 2**31 - 1

#: The least probability that `assign` can store as a logit.
_LEAST_PROBABILITY = 1e-7

#: What a value made from an example keeps of its label; the rest goes to all classes, so
#: that the logits are finite and can still learn.
CERTAINTY = 0.99

DROPOUT_SCOPES = ("example", "batch")


@keras.saving.register_keras_serializable("nsl_keras")
class NeighborDictionary(keras.layers.Layer):
    """Attention over a learned dictionary of `S` neighbours `{(k_j, v_j)}`.

    For a query `z` the layer returns the weights

        w_j(z) = softmax_j(sim(z, k_j) / temperature)

    with the cosine, or minus the squared Euclidean distance, as `sim`. The values are
    class probabilities, `v = softmax(value_scale * logits)`, or free targets of a
    regression, or fixed; they are read through `values`. Attention is computed in float32.

    In training, `floor(S * dropout)` entries are left out, drawn uniformly for every
    example or once per batch, and the softmax runs over the rest.

    Args:
        num_neighbors: int, the number of entries `S`.
        num_values: int, the length of a value (classes, or outputs of a regression).
            `None` takes it from values that are given, or else from the
            `MetaNeighborhoodHead` that uses the dictionary: its number of outputs.
        metric: `"cosine"`, `"euclidean"`, a name given by
            `nsl_keras.key_metrics.register`, or a `nsl_keras.key_metrics.KeyMetric`.
        temperature: float above 0; small values look at few neighbours. Not trained, as
            in the paper, which finds that a learned temperature shrinks and overfits.
        value_scale: float above 0, the factor inside the values' softmax.
        fixed_values: bool, or the values themselves, of shape `(num_neighbors,
            num_values)`, which then are not trained. `True` stands for one-hot rows, the
            classes in equal, contiguous shares; a regression has no such values.
        dropout: float in [0, 1), the share of entries left out in training.
        dropout_scope: `"example"` or `"batch"`. With `"batch"` a head does not compute the
            entries left out at all: training takes less time.
        key_initializer: Initializer of the keys; `None` is a normal distribution of
            standard deviation 0.05.
        value_initializer: Initializer of the value logits, or of a regression's values;
            `None` is a truncated normal distribution of standard deviation 0.01.
        task: `"classification"` or `"regression"`, what the values are. `None` leaves it
            to the head; without one it is a classification.
        seed: int or `None`, the seed of dropout.
        **kwargs: `name`, `dtype`, `trainable` of `keras.layers.Layer`.

    Call arguments:
        inputs: Queries, of shape `(batch, features)`.
        training: bool, whether to leave entries out.

    Input shape:
        `(batch, features)`.

    Output shape:
        `(batch, num_neighbors)`; rows sum to 1, entries left out have weight 0.

    Raises:
        ValueError: For arguments outside the ranges above, among them a dictionary of
            less than one entry, and fixed values that are no probabilities; at build, if
            `num_values` is still unknown, or another than the head's.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> dictionary = nsl_keras.layers.NeighborDictionary(100, num_values=10)
    >>> weights = dictionary(keras.random.normal((4, 32), seed=0))
    >>> tuple(weights.shape), tuple(dictionary.values.shape)
    ((4, 100), (100, 10))

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.3, Eq. (5); Appendix
        A.2 for dropout and temperature. Initializers, the value scale of 10 and the
        fixed values are those of the authors' code.
    """

    def __init__(
        self,
        num_neighbors: int,
        num_values: int | None = None,
        metric: str | KeyMetric = "cosine",
        temperature: float = 0.2,
        value_scale: float = 10.0,
        fixed_values: Any = False,
        dropout: float = 0.5,
        dropout_scope: str = "example",
        key_initializer: Any = None,
        value_initializer: Any = None,
        task: str | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_neighbors = validation.positive_integer(num_neighbors, "num_neighbors")
        self.num_values = validation.optional(
            validation.positive_integer, num_values, "num_values"
        )
        self.metric = key_metrics.get(metric)
        self.temperature = validation.positive_number(temperature, "temperature")
        self.value_scale = validation.positive_number(value_scale, "value_scale")
        self.task = validation.optional(validation.one_of, task, LOSSES, "task")
        self.fixed_values: bool | list[list[float]] = (
            fixed_values
            if isinstance(fixed_values, bool)
            else self._checked_values(fixed_values, "fixed_values").tolist()
        )
        if isinstance(self.fixed_values, list):
            self.num_values = len(self.fixed_values[0])
        self._check_fixed_values()
        self.dropout = validation.fraction(dropout, "dropout")
        self.dropout_scope = validation.one_of(
            dropout_scope, DROPOUT_SCOPES, "dropout_scope"
        )
        self.key_initializer = keras.initializers.get(
            key_initializer or keras.initializers.RandomNormal(stddev=0.05)
        )
        self.value_initializer = keras.initializers.get(
            value_initializer or keras.initializers.TruncatedNormal(stddev=0.01)
        )
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.input_spec = keras.layers.InputSpec(ndim=2)

    def set_outputs(self, num_values: int, task: str) -> None:
        """Sets what the arguments left open, as the head does that uses the dictionary.

        Args:
            num_values: int, the number of the head's outputs.
            task: `"classification"` or `"regression"`, the head's task.

        Raises:
            ValueError: If the dictionary has another `num_values` or `task` already.
        """
        for name, own, given in (
            ("num_values", self.num_values, num_values),
            ("task", self.task, task),
        ):
            if own not in (None, given):
                raise ValueError(
                    f"`{name}` of a dictionary must be that of the head that uses it. "
                    f"Received: dictionary {self.name!r} with {name}={own!r}, a head "
                    f"with {name}={given!r}"
                )
        self.num_values, self.task = num_values, task
        self._check_fixed_values()

    def _check_fixed_values(self) -> None:
        if self.fixed_values is True and self.task == "regression":
            raise ValueError(
                '`fixed_values` must be the values themselves with task="regression", '
                f"of shape ({self.num_neighbors}, {self.num_values}). "
                "Received: fixed_values=True"
            )
        if isinstance(self.fixed_values, list):
            self._checked_values(self.fixed_values, "fixed_values")

    def _checked_values(self, values: Any, name: str) -> np.ndarray:
        values = np.asarray(values)
        outputs = self.num_values or (1, *values.shape)[-1]
        expected = (self.num_neighbors, outputs)
        if values.dtype.kind not in "biuf" or values.shape != expected:
            raise ValueError(
                f"`{name}` must be numbers of shape {expected}, (entries, outputs). "
                f"Received: {name} of shape {values.shape} and dtype {values.dtype}"
            )
        if self.task == "classification":
            validation.probabilities(values, name)
        else:
            validation.finite(values, name)
        return values

    @property
    def num_dropped(self) -> int:
        """Number of entries left out of a training step's softmax."""
        # 100 * 0.29 is a little less than 29.
        dropped = math.floor(round(self.num_neighbors * self.dropout, 6))
        return min(dropped, self.num_neighbors - 1)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        features = validation.known_axis(input_shape, -1, "last axis")
        if self.num_values is None:
            raise ValueError(
                "`num_values` must be given to a dictionary that no head uses. "
                "Received: num_values=None"
            )
        self.set_outputs(self.num_values, self.task or "classification")
        self.input_spec = keras.layers.InputSpec(ndim=2, axes={-1: features})
        self.keys = self.add_weight(
            name="keys",
            shape=(self.num_neighbors, features),
            initializer=self.key_initializer,
            autocast=False,
        )
        #: What the values are made of, if they are trained: logits, or the targets.
        self.value_logits: Any = None
        self.value_targets: Any = None
        if self.fixed_values is False:
            name = "value_logits" if self.task == "classification" else "value_targets"
            weight = self.add_weight(
                name=name,
                shape=(self.num_neighbors, self.num_values),
                initializer=self.value_initializer,
                autocast=False,
            )
            setattr(self, name, weight)

    @property
    def values(self) -> Tensor:
        """The values, of shape `(num_neighbors, num_values)`.

        In classification rows sum to 1.

        Raises:
            ValueError: If the dictionary is not built yet.
        """
        validation.built(self, "values")
        if self.value_logits is not None:
            return ops.softmax(self.value_scale * ops.convert_to_tensor(self.value_logits))
        if self.value_targets is not None:
            return ops.convert_to_tensor(self.value_targets)
        if self.fixed_values is True:
            return ops.one_hot(
                self.fixed_classes(), self.num_values, dtype=self.variable_dtype
            )
        return ops.convert_to_tensor(self.fixed_values, dtype=self.variable_dtype)

    def fixed_classes(self) -> np.ndarray:
        """Entry s belongs to class floor(s * C / S): equal, contiguous shares."""
        return np.arange(self.num_neighbors) * self.num_values // self.num_neighbors

    def assign(self, keys: Any = None, values: Any = None) -> None:
        """Sets the keys, the values, or both.

        Args:
            keys: Array of shape `(num_neighbors, features)`, or `None`.
            values: Array of shape `(num_neighbors, num_values)`, or `None`: class
                probabilities (those below 1e-7 are raised to it), or targets.

        Raises:
            ValueError: For arrays of another shape, for NaN, infinities, and all-zero
                keys under the cosine metric; for values that are no probabilities; and
                for values of a dictionary where they are fixed; and for a dictionary
                that is not built yet.
        """
        validation.built(self, "assign")
        if keys is not None:
            keys = self.checked_keys(keys)
        if values is not None:
            if self.fixed_values is not False:
                raise ValueError(
                    "`values` must be None where the dictionary has fixed values. "
                    f"Received: values of shape {np.shape(values)}"
                )
            values = self._checked_values(values, "values")
        if keys is not None:
            self.keys.assign(keys)
        if values is not None and self.value_logits is None:
            self.value_targets.assign(values)
        elif values is not None:
            logits = np.log(np.maximum(values, _LEAST_PROBABILITY))
            self.value_logits.assign(logits / self.value_scale)

    def checked_keys(self, keys: Any, name: str = "keys") -> np.ndarray:
        """Returns an array if it can be the keys; raises a `ValueError` otherwise."""
        # Features of a mixed-precision backbone are no type that NumPy knows.
        keys = ops.convert_to_numpy(keys).astype(self.variable_dtype)
        expected = tuple(self.keys.shape)
        if keys.shape != expected:
            raise ValueError(
                f"`{name}` must have shape {expected}, (entries, features). "
                f"Received: {name}.shape={keys.shape}"
            )
        validation.finite(keys, name)
        zero = ~np.any(keys, axis=1)
        if not self.metric.defined_at_zero and zero.any():
            raise ValueError(
                f"`{name}` must not be all zero under the cosine metric: a zero vector "
                f"has no direction. Received: {int(zero.sum())} such rows, the first at "
                f"index {int(np.argmax(zero))}"
            )
        return keys

    def initialize_from(self, features: Any, y: Any, seed: int | None = None) -> None:
        """Sets the entries to examples, drawn at random without replacement.

        Keys become the features; values become the labels, smoothed by 1 % towards uniform
        so that they can still learn, or a regression's targets. The classes come
        in equal shares (where one has too few examples, the others fill up), or as fixed
        one-hot values have them.

        Args:
            features: Array of shape `(n, features)`.
            y: Class numbers, of shape `(n,)` or `(n, 1)`; class probabilities, of shape
                `(n, num_values)`; or targets, of that shape (or `(n,)` for one output).
            seed: int or `None`, the seed of the draw.

        Raises:
            ValueError: For fewer examples than entries, labels outside the classes,
                classes without an example, NaN, infinities, all-zero features under
                the cosine metric, and where given values are fixed.
        """
        features = ops.convert_to_numpy(features)
        y = np.asarray(y)
        require_same_length(features, y, "features")
        if not self.built:
            self.build((None, *features.shape[1:]))
        drawn = self.draw_examples(y, seed)
        self.assign_examples(features[drawn], y[drawn])

    def draw_examples(self, y: np.ndarray, seed: int | None) -> np.ndarray:
        """Draws the examples for `assign_examples`, without replacement.

        Args:
            y: Labels or targets of all examples.
            seed: Seed of the draw.

        Returns:
            Indices of the examples, one an entry.

        Raises:
            ValueError: If there are fewer examples than entries; for labels outside the
                classes, and for classes without an example.
        """
        entries = self.num_neighbors
        if self.task == "classification":
            validation.class_labels(y, self.num_values)
        else:
            validation.targets(y, self.num_values)
        if len(y) < entries:
            raise ValueError(
                "`y` must have at least as many examples as the dictionary has entries. "
                f"Received: {len(y)} examples, num_neighbors={entries}"
            )
        generator = keras.random.SeedGenerator(seed)
        draws = ops.convert_to_numpy(keras.random.uniform((len(y),), seed=generator))
        if self.task == "regression":
            return np.argsort(draws)[:entries]
        classes = np.argmax(_as_probabilities(y, self.num_values), axis=1)
        by_class = [
            members[np.argsort(draws[members])]
            for members in (
                np.flatnonzero(classes == label) for label in range(self.num_values)
            )
        ]
        unseen = [label for label, members in enumerate(by_class) if not len(members)]
        if unseen:
            raise ValueError(
                "`y` must hold every class. Received: no example of class "
                f"{', '.join(map(str, unseen))}"
            )
        if self.fixed_values is True:
            return _drawn_for(self.fixed_classes(), by_class)
        # In rounds over the classes: the first of each, then the second of each, ...
        rounds = np.concatenate([np.arange(len(members)) for members in by_class])
        order = np.argsort(rounds, kind="stable")[:entries]
        return np.concatenate(by_class)[order]

    def assign_examples(self, features: np.ndarray, y: np.ndarray) -> None:
        """Makes each of the drawn examples an entry.

        Args:
            features: Array of shape `(num_neighbors, features)`.
            y: Labels or targets of these examples.

        Raises:
            ValueError: For features that are not finite, or all zero under the cosine
                metric; and for a dictionary of given values.
        """
        if isinstance(self.fixed_values, list):
            raise ValueError(
                "`fixed_values` must be True or False for entries from examples: values "
                "that are given do not belong to them. "
                "Received: a dictionary of given values"
            )
        features = self.checked_keys(features, "features")
        if self.fixed_values is True:
            self.assign(keys=features)
        elif self.task == "regression":
            self.assign(features, np.reshape(y, (-1, self.num_values)))
        else:
            certain = _as_probabilities(y, self.num_values)
            values = CERTAINTY * certain + (1 - CERTAINTY) / self.num_values
            self.assign(features, values)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        weights = self.attention(inputs, self.draw_kept(inputs, training))
        return ops.cast(weights, self.compute_dtype)

    def look_up(
        self, queries: Tensor, training: bool | None = None, kept: Tensor | None = None
    ) -> tuple[Entries, Tensor]:
        """Returns the entries that take part, and the queries' attention to them.

        Entries that a whole batch leaves out are not among them.

        Args:
            queries: Tensor of shape `(batch, features)`.
            training: bool, whether to leave entries out.
            kept: Boolean tensor, as in `attention`, instead of a draw.

        Returns:
            `(entries, attention)` in the dtype of the queries, or float32 if that is
            wider: keys and values, and weights of shape `(batch, entries)`.

        Raises:
            ValueError: If the dictionary is not built yet.
        """
        validation.built(self, "look_up")
        queries = at_least_float32(queries)
        keys, values = (
            ops.cast(ops.convert_to_tensor(rows), queries.dtype)
            for rows in (self.keys, self.values)
        )
        if kept is None and self._drops(training) and self.dropout_scope == "batch":
            taken = self._random_order()[self.num_dropped :]
            keys, values = (ops.take(rows, taken, axis=0) for rows in (keys, values))
        elif kept is None:
            kept = self.draw_kept(queries, training)
        return Entries(keys, values), self._attention(queries, keys, kept)

    def attention(self, queries: Tensor, kept: Tensor | None = None) -> Tensor:
        """Returns the attention weights over the entries, in float32 or wider.

        Args:
            queries: Tensor of shape `(batch, features)`.
            kept: Boolean tensor of shape `(batch, num_neighbors)`, or `(1,
                num_neighbors)` for all examples alike; the entries that take part.
                `None` is all of them.

        Returns:
            Tensor of shape `(batch, num_neighbors)`.

        Raises:
            ValueError: If the dictionary is not built yet.
        """
        validation.built(self, "attention")
        return self._attention(queries, self.keys, kept)

    def _attention(self, queries: Tensor, keys: Tensor, kept: Tensor | None) -> Tensor:
        shape = tuple(queries.shape if hasattr(queries, "shape") else np.shape(queries))
        features = self.keys.shape[-1]
        if len(shape) != 2 or shape[-1] not in (None, features):
            raise ValueError(
                f"Features must have shape (batch, {features}), as wide as the keys of the "
                f"dictionary. Received: shape {shape}"
            )
        similarity = self.metric(queries, keys)
        if similarity.shape[-1] == 1:
            return ops.ones_like(similarity)  # Keras warns of a softmax over one entry.
        scores = similarity / self.temperature
        if kept is not None:
            # Far below any score: the weight of an entry left out is exactly zero.
            scores = ops.where(kept, scores, -1e30)
        return ops.softmax(scores)  # MN Eq. (5)

    def _drops(self, training: bool | None) -> bool:
        return bool(training) and self.num_dropped > 0

    def _random_order(self) -> Tensor:
        draws = keras.random.uniform((self.num_neighbors,), seed=self.seed_generator)
        return ops.argsort(draws)

    def draw_kept(self, queries: Tensor, training: bool | None) -> Tensor | None:
        """Draws the entries that take part in a training step.

        One random order of the entries serves all rows, each row reading it along its
        own random affine map `j -> multiplier * j + offset (mod S)`. Such a map is a
        bijection, so the set of a row is uniform over all sets of its size; the sets of
        two rows are not strictly independent. It takes one sort instead of one a row,
        which would cost as much as the adaptation itself.

        Args:
            queries: Tensor of shape `(batch, features)`.
            training: bool, whether this is a training step.

        Returns:
            Boolean tensor of shape `(batch, num_neighbors)`, or `(1, num_neighbors)`
            with `dropout_scope="batch"`, exactly `num_dropped` entries of each row
            false; `None` where nothing is left out.
        """
        if not self._drops(training):
            return None
        ranks = self._random_order()
        if self.dropout_scope == "batch":
            return ranks[None, :] >= self.num_dropped
        rows, entries = ops.shape(queries)[0], self.num_neighbors
        multipliers = ops.convert_to_tensor(_coprimes(entries), dtype="int32")
        choice = keras.random.randint(
            (rows, 1), 0, multipliers.shape[0], seed=self.seed_generator
        )
        offset = keras.random.randint((rows, 1), 0, entries, seed=self.seed_generator)
        row = ops.arange(entries, dtype="int32")[None, :]
        index = (row * ops.take(multipliers, choice) + offset) % entries
        return ops.take(ranks, index) >= self.num_dropped

    def compute_output_shape(
        self, input_shape: tuple[int | None, ...]
    ) -> tuple[int | None, ...]:
        return (input_shape[0], self.num_neighbors)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "num_neighbors": self.num_neighbors,
            "num_values": self.num_values,
            "metric": key_metrics.serialize(self.metric),
            "temperature": self.temperature,
            "value_scale": self.value_scale,
            "fixed_values": self.fixed_values,
            "dropout": self.dropout,
            "dropout_scope": self.dropout_scope,
            "key_initializer": keras.initializers.serialize(self.key_initializer),
            "value_initializer": keras.initializers.serialize(self.value_initializer),
            "task": self.task,
            "seed": self.seed,
        }


@functools.lru_cache(maxsize=64)
def _coprimes(size: int) -> tuple[int, ...]:
    """Numbers below `size` (and small enough) that share no factor with it."""
    # The largest product is (size - 1) * multiplier + (size - 1).
    largest = min(size, _LARGEST_PRODUCT // size)
    return tuple(n for n in range(1, max(largest, 2)) if math.gcd(n, size) == 1)


def require_same_length(examples: Any, y: Any, name: str, name_of_y: str = "y") -> None:
    """Raises unless there is one label or target for each example."""
    if len(examples) != len(y):
        raise ValueError(
            f"`{name}` and `{name_of_y}` must have the same length. "
            f"Received: len({name})={len(examples)}, len({name_of_y})={len(y)}"
        )


def _drawn_for(wanted: np.ndarray, by_class: list[np.ndarray]) -> np.ndarray:
    """One example for each of the wanted classes, which are sorted."""
    counts = np.bincount(wanted, minlength=len(by_class))
    for label, (members, count) in enumerate(zip(by_class, counts, strict=True)):
        if len(members) < count:
            raise ValueError(
                "`y` must have an example for each entry of a class with fixed values. "
                f"Received: {len(members)} examples of class {label}, which has "
                f"{count} entries"
            )
    return np.concatenate(
        [members[:count] for members, count in zip(by_class, counts, strict=True)]
    )


def _as_probabilities(y: np.ndarray, classes: int) -> np.ndarray:
    """Labels, already checked, as rows of probabilities."""
    if y.ndim == 2 and y.shape[1] == classes:
        return y
    return np.eye(classes)[np.reshape(y, -1).astype("int64")]
