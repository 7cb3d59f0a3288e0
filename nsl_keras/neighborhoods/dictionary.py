"""The dictionary of induced neighbors: keys, values, and the attention over them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.neighborhoods import key_metrics
from nsl_keras.neighborhoods.inner_loop import LOSSES, Entries
from nsl_keras.neighborhoods.key_metrics import KeyMetric

#: The smallest probability that `assign` can store as a logit.
_LEAST_PROBABILITY = 1e-7

#: The weight of the label in an example's value. All classes share the rest, so that the
#: logits are finite and can still learn.
_CERTAINTY = 0.99


@keras.saving.register_keras_serializable("nsl_keras")
class NeighborDictionary(keras.layers.Layer):
    """Attention over a learned dictionary of `S` neighbors `{(k_j, v_j)}`.

    For a query `z` the layer returns the weights

        w_j(z) = softmax_j(sim(z, k_j) / temperature)

    where `sim` is the cosine, or the negative squared Euclidean distance. The values are
    class probabilities, `v = softmax(value_scale * logits)`, free targets of a regression,
    or fixed; read them from `values`. Attention is computed in float32.

    Args:
        num_neighbors: int, the number of entries `S`.
        num_values: int, the number of classes or regression outputs. `None` takes it from
            given values, or from the `MetaNeighborhoodHead` that uses the dictionary.
        metric: `"cosine"`, `"euclidean"`, or a `nsl_keras.key_metrics.KeyMetric`.
        temperature: float above 0; small values concentrate attention on few neighbors.
        learn_temperature: bool, whether to train the temperature. Then the absolute value
            of a weight is `1 / temperature`. Appendix A.4 reports that it overfits.
        value_scale: float above 0, the factor inside the values' softmax.
        fixed_values: bool, or untrained values of shape `(num_neighbors, num_values)`.
            In classification, `True` fixes one-hot values in equal, contiguous shares.
        dropout: float in [0, 1). Training leaves out `floor(S * dropout)` entries, drawn
            uniformly, and the softmax runs over the rest.
        dropout_scope: `"example"`, or `"batch"` for one draw per batch, which is faster.
        key_initializer: Initializer of the keys; the default has standard deviation 0.05.
        task: `"classification"` or `"regression"`. `None` takes the task from the head;
            without a head it is `"classification"`.
        seed: int or `None`, the seed of dropout.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        training: bool, whether to leave entries out.

    Input shape:
        `(batch, features)`.

    Output shape:
        `(batch, num_neighbors)`; rows sum to 1, and entries left out have weight 0.

    Raises:
        ValueError: For invalid arguments, including a classifier's fixed values that are
            not probabilities; at build, if `num_values` is unknown or is not the head's.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> dictionary = nsl_keras.layers.NeighborDictionary(100, num_values=10)
    >>> weights = dictionary(keras.random.normal((4, 32), seed=0))
    >>> tuple(weights.shape), tuple(dictionary.values.shape)
    ((4, 100), (100, 10))

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.3, Eq. (5), and Appendix
        A.2. Initializers, value scale and fixed values follow the authors' code.
    """

    def __init__(
        self,
        num_neighbors: int,
        num_values: int | None = None,
        metric: str | KeyMetric = "cosine",
        temperature: float = 0.2,
        learn_temperature: bool = False,
        value_scale: float = 10.0,
        fixed_values: Any = False,
        dropout: float = 0.5,
        dropout_scope: str = "example",
        key_initializer: Any = "random_normal",
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
        self.learn_temperature = validation.boolean(learn_temperature, "learn_temperature")
        self.value_scale = validation.positive_number(value_scale, "value_scale")
        self.task = validation.optional(validation.one_of, task, LOSSES, "task")
        if not isinstance(fixed_values, bool):
            fixed_values = self._checked(fixed_values, "fixed_values").tolist()
            self.num_values = len(fixed_values[0])
        self.fixed_values = fixed_values
        self.dropout = validation.fraction(dropout, "dropout")
        share = math.floor(round(num_neighbors * dropout, 6))  # 100 * 0.29 is below 29.
        #: The number of entries left out.
        self.num_dropped = min(share, num_neighbors - 1)
        scopes = ("example", "batch")
        self.dropout_scope = validation.one_of(dropout_scope, scopes, "dropout_scope")
        self.key_initializer = keras.initializers.get(key_initializer)
        # Created here so that it uses the global seed at construction.
        self._value_initializer = keras.initializers.TruncatedNormal(stddev=0.01)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.input_spec = keras.layers.InputSpec(ndim=2)

    def set_outputs(self, num_values: Any, task: str) -> None:
        """Takes `num_values` and `task` from the head; raises unless they fit."""
        own = (self.num_values or num_values, self.task or task)
        demand = f"one with the head's num_values and task, {(num_values, task)}"
        validation.require(own == (num_values, task), "dictionary", demand, own)
        self.num_values, self.task = own
        fits = self.fixed_values is not True or task == "classification"
        demand = 'False or the values themselves with task="regression"'
        validation.require(fits, "fixed_values", demand, True)
        if self.fixed_values is True:  # Equal, contiguous shares of the classes.
            classes = np.arange(self.num_neighbors) * num_values // self.num_neighbors
            self._fixed = np.eye(num_values)[classes]
        elif self.fixed_values is not False:
            self._fixed = self._checked(self.fixed_values, "fixed_values")

    def _checked(self, values: Any, name: str) -> np.ndarray:
        values = np.asarray(values)
        expected = (self.num_neighbors, self.num_values or (1, *values.shape)[-1])
        fits = values.dtype.kind in "biuf" and values.shape == expected
        demand = f"numbers of shape {expected}, (entries, outputs)"
        validation.require(fits, name, demand, (values.shape, values.dtype))
        if self.task == "classification":
            validation.require_probabilities(values, name)
        else:
            validation.require_finite(values, name)
        return values

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        features = validation.known_axis(input_shape, -1, "last axis")
        demand = "given for a dictionary without a head"
        validation.require(self.num_values is not None, "num_values", demand, None)
        self.set_outputs(self.num_values, self.task or "classification")
        self.input_spec = keras.layers.InputSpec(ndim=2, axes={-1: features})
        add = functools.partial(self.add_weight, autocast=False)
        self.keys = add((self.num_neighbors, features), self.key_initializer, name="keys")
        self.inverse_temperature: Any = 1 / self.temperature
        if self.learn_temperature:
            start = keras.initializers.Constant(self.inverse_temperature)
            self.inverse_temperature = add((), start, name="inverse_temperature")
        if self.fixed_values is False:
            name = "value_logits" if self.task == "classification" else "value_targets"
            shape = (self.num_neighbors, self.num_values)
            self.raw_values = add(shape, self._value_initializer, name=name)

    @property
    def values(self) -> Tensor:
        """The values, of shape `(num_neighbors, num_values)`; probabilities sum to 1."""
        validation.require_built(self, "values")
        return self.values_of()

    def values_of(self, indices: Tensor | None = None) -> Tensor:
        """Returns the values of some entries, or of all."""
        given = self.raw_values if self.fixed_values is False else self._fixed
        stored = ops.convert_to_tensor(given, self.variable_dtype)
        stored = stored if indices is None else ops.take(stored, indices, axis=0)
        if self.fixed_values is not False or self.task == "regression":
            return stored
        return ops.softmax(self.value_scale * stored)

    def assign(self, keys: Any = None, values: Any = None) -> None:
        """Sets the keys, the values, or both.

        Args:
            keys: Array of shape `(num_neighbors, features)`, or `None`.
            values: Array of shape `(num_neighbors, num_values)`, or `None`: class
                probabilities (at least 1e-7 is stored), or targets.

        Raises:
            ValueError: If the dictionary is not built or has fixed values, and for arrays
                of another shape, arrays that are not finite, and invalid probabilities.
        """
        validation.require_built(self, "assign")
        if values is not None:
            demand = "None if the dictionary has fixed values"
            validation.require(self.fixed_values is False, "values", demand, values)
            values = self._checked(values, "values")
            if self.task == "classification":
                values = np.log(np.maximum(values, _LEAST_PROBABILITY)) / self.value_scale
        if keys is not None:
            keys = ops.convert_to_numpy(keys)
            validation.require_finite(keys, "keys")
            self.keys.assign(keys)
        if values is not None:
            self.raw_values.assign(values)

    def require_targets(self, y: Any) -> None:
        """Raises unless `y` holds labels of the classes, or a regression's targets."""
        if self.task == "classification":
            validation.require_class_labels(y, self.num_values)
        else:
            validation.require_targets(y, self.num_values)

    def draw_examples(self, y: np.ndarray, examples: int, seed: int | None) -> np.ndarray:
        """Returns the indices of examples that become entries; see `initialize_from`."""
        validation.optional(validation.non_negative_integer, seed, "seed")
        validation.require_one_per_example(y, examples, "y")
        fits = examples >= self.num_neighbors
        demand = f"at least {self.num_neighbors}, one for each entry, or make fewer entries"
        validation.require(fits, "len(y)", demand, examples)
        generator = keras.random.SeedGenerator(seed)
        draws = keras.random.uniform((examples,), seed=generator)
        order = np.argsort(ops.convert_to_numpy(draws))
        if self.task == "regression":
            return order[: self.num_neighbors]
        classes = classes_of(y)
        by_class = [order[classes[order] == label] for label in range(self.num_values)]
        # In rounds over the classes: the first of each, then the second of each, ...
        rounds = np.concatenate([np.arange(len(members)) for members in by_class])
        first = np.argsort(rounds, kind="stable")[: self.num_neighbors]
        return np.concatenate(by_class)[first]

    def assign_examples(self, features: np.ndarray, y: np.ndarray) -> None:
        """Sets entries to drawn examples' features, and smoothed labels or targets."""
        values = np.reshape(y, (len(y), -1))
        if self.task == "classification":
            if values.shape[1] == 1:
                values = np.eye(self.num_values)[classes_of(y)]
            values = _CERTAINTY * values + (1 - _CERTAINTY) / self.num_values
        self.assign(features, values)

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        kept = self.draw_kept(inputs) if training and self.num_dropped else None
        return ops.cast(self.attention(inputs, kept), self.compute_dtype)

    def attention(self, queries: Tensor, kept: Tensor | None = None) -> Tensor:
        """Returns attention weights `(batch, num_neighbors)` in float32 or wider.

        Raises a `ValueError` if the dictionary is not built.

        Args:
            queries: Tensor of shape `(batch, features)`.
            kept: Same as for `MetaNeighborhoodHead`, but `None` always means all entries.
        """
        validation.require_built(self, "attention")
        return self.look_up(at_least_float32(queries), kept=kept)[1]

    def look_up(
        self,
        queries: Tensor,
        training: bool | None = None,
        kept: Tensor | None = None,
        constants: Sequence[Tensor] = (),
    ) -> tuple[Entries, Tensor]:
        """Returns the entries that take part, and their attention, in the queries' dtype.

        With `dropout_scope="batch"`, dropped entries are not returned. If `kept` is given,
        none are drawn. `constants` are those of the inner loop, if it has any.
        """
        width = self.keys.shape[-1]
        if queries.shape[-1] not in (None, width):  # Only a call checks the `input_spec`.
            raise ValueError(
                f"`features.shape` must be (batch, {width}). Received: "
                f"features.shape={tuple(queries.shape)}"
            )
        keys, values = ops.cast(self.keys, queries.dtype), None
        if not constants:
            values = ops.cast(self.values_of(), queries.dtype)
        if kept is None and training and self.num_dropped:
            kept = self.draw_kept(queries)
            if self.dropout_scope == "batch":
                # Entries that are left out, 0, come before those that are kept, 1.
                taken = ops.argsort(ops.cast(kept[0], "int32"))[self.num_dropped :]
                keys, values = (ops.take(rows, taken, axis=0) for rows in (keys, values))
                kept = None
        scores = self.metric(queries, keys)
        scores = scores * ops.abs(ops.cast(self.inverse_temperature, scores.dtype))
        if kept is not None:
            # Far below any score, so that the weight is exactly zero.
            scores = ops.where(kept, scores, -1e30)
        # MN Eq. (5): attention. Keras warns of a softmax over one entry.
        attention = ops.ones_like(scores) if scores.shape[-1] == 1 else ops.softmax(scores)
        return Entries(keys, values, constants), attention

    def draw_kept(self, queries: Tensor) -> Tensor:
        """Draws `kept` for a training step.

        All rows share one random order of the entries, which each row reads from its own
        random start. Each row's set is uniform, but two rows are not independent.
        """
        rows, entries, seed = ops.shape(queries)[0], self.num_neighbors, self.seed_generator
        kept = ops.argsort(keras.random.uniform((entries,), seed=seed)) >= self.num_dropped
        if self.dropout_scope == "batch":
            return kept[None]
        start = keras.random.randint((rows, 1), 0, entries, seed=seed)
        return ops.take(kept, (ops.arange(entries)[None] + start) % entries)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        return (input_shape[0], self.num_neighbors)

    def get_config(self) -> dict[str, Any]:
        serialize = keras.saving.serialize_keras_object
        return {
            **super().get_config(),
            "num_neighbors": self.num_neighbors,
            "num_values": self.num_values,
            "metric": serialize(self.metric),
            "temperature": self.temperature,
            "learn_temperature": self.learn_temperature,
            "value_scale": self.value_scale,
            "fixed_values": self.fixed_values,
            "dropout": self.dropout,
            "dropout_scope": self.dropout_scope,
            "key_initializer": serialize(self.key_initializer),
            "task": self.task,
            "seed": self.seed,
        }


def classes_of(y: np.ndarray) -> np.ndarray:
    """Returns valid labels, integers or rows of probabilities, as classes."""
    rows = np.reshape(y, (len(y), -1))
    return rows[:, 0].astype("int64") if rows.shape[1] == 1 else rows.argmax(axis=1)
