"""The dictionary of induced neighbours: keys, values, and attention over them."""

from __future__ import annotations

import functools
import math
from typing import Any

import keras
from keras import ops

from nsl_keras import validation
from nsl_keras.backend.precision import at_least_float32
from nsl_keras.neighborhoods.unit_norm import unit_norm

Tensor = Any

#: Multipliers stay small enough for products of two indices to fit an int32.
_LARGEST_PRODUCT = 2**31 - 1

METRICS = ("cosine", "euclidean")
DROPOUT_SCOPES = ("example", "batch")


@keras.saving.register_keras_serializable("nsl_keras")
class NeighborDictionary(keras.layers.Layer):
    """Attention over a learned dictionary of `S` neighbours `{(k_j, v_j)}`.

    For a query `z` the layer returns the weights

        w_j(z) = softmax_j(sim(z, k_j) / temperature)

    with the cosine, or minus the squared Euclidean distance, as `sim`. The values are
    class probabilities, `v = softmax(value_scale * logits)`, or fixed one-hot rows; they
    are read through `values`. Attention is computed in float32.

    In training, `floor(S * dropout)` entries are left out, drawn uniformly for every
    example or once per batch, and the softmax runs over the rest.

    Args:
        num_neighbors: int, the number of entries `S`.
        num_values: int, the length of a value (classes).
        metric: `"cosine"` or `"euclidean"`.
        temperature: float above 0; small values look at few neighbours. Not trained, as
            in the paper, which finds that a learned temperature shrinks and overfits.
        value_scale: float above 0, the factor inside the values' softmax.
        fixed_values: bool; if true, values are one-hot rows that are not trained, the
            classes in equal, contiguous shares.
        dropout: float in [0, 1), the share of entries left out in training.
        dropout_scope: `"example"` or `"batch"`.
        key_initializer: Initializer of the keys; `None` is a normal distribution of
            standard deviation 0.05.
        value_initializer: Initializer of the value logits; `None` is a truncated normal
            distribution of standard deviation 0.01.
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
            less than one entry, and a dropout that keeps no entry.

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
        num_values: int,
        metric: str = "cosine",
        temperature: float = 0.2,
        value_scale: float = 10.0,
        fixed_values: bool = False,
        dropout: float = 0.5,
        dropout_scope: str = "example",
        key_initializer: Any = None,
        value_initializer: Any = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_neighbors = validation.positive_integer(num_neighbors, "num_neighbors")
        self.num_values = validation.positive_integer(num_values, "num_values")
        self.metric = validation.one_of(metric, METRICS, "metric")
        self.temperature = validation.positive_number(temperature, "temperature")
        self.value_scale = validation.positive_number(value_scale, "value_scale")
        self.fixed_values = fixed_values
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

    @property
    def num_dropped(self) -> int:
        """Number of entries left out of a training step's softmax."""
        return math.floor(self.num_neighbors * self.dropout)

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        features = validation.known_axis(input_shape, -1, "last axis")
        self.input_spec = keras.layers.InputSpec(ndim=2, axes={-1: features})
        self.keys = self.add_weight(
            name="keys",
            shape=(self.num_neighbors, features),
            initializer=self.key_initializer,
            autocast=False,
        )
        self.value_logits = (
            None
            if self.fixed_values
            else self.add_weight(
                name="value_logits",
                shape=(self.num_neighbors, self.num_values),
                initializer=self.value_initializer,
                autocast=False,
            )
        )

    @property
    def values(self) -> Tensor:
        """The values, of shape `(num_neighbors, num_values)`; rows sum to 1."""
        if self.value_logits is None:
            # Entry s belongs to class floor(s * C / S): equal, contiguous shares.
            entries = ops.arange(self.num_neighbors, dtype="int32")
            classes = (entries * self.num_values) // self.num_neighbors
            return ops.one_hot(classes, self.num_values, dtype=self.variable_dtype)
        return ops.softmax(self.value_scale * ops.convert_to_tensor(self.value_logits))

    def call(self, inputs: Tensor, training: bool | None = None) -> Tensor:
        weights = self.attention(inputs, self.draw_kept(inputs, training))
        return ops.cast(weights, self.compute_dtype)

    def attention(self, queries: Tensor, kept: Tensor | None = None) -> Tensor:
        """Returns the attention weights over given entries, in float32 or wider.

        Args:
            queries: Tensor of shape `(batch, features)`.
            kept: Boolean tensor of shape `(batch, num_neighbors)`, or `(1,
                num_neighbors)` for all examples alike; the entries that take part.
                `None` is all of them.

        Returns:
            Tensor of shape `(batch, num_neighbors)`.
        """
        queries = at_least_float32(queries)
        keys = ops.cast(ops.convert_to_tensor(self.keys), queries.dtype)
        if self.metric == "cosine":
            similarity = ops.matmul(unit_norm(queries), ops.transpose(unit_norm(keys)))
        else:
            similarity = (
                2 * ops.matmul(queries, ops.transpose(keys))
                - ops.sum(ops.square(queries), axis=-1, keepdims=True)
                - ops.sum(ops.square(keys), axis=-1)
            )
        if self.num_neighbors == 1:
            return ops.ones_like(similarity)  # Keras warns of a softmax over one entry.
        scores = similarity / self.temperature
        if kept is not None:
            # Far below any score: the weight of an entry left out is exactly zero.
            scores = ops.where(kept, scores, -1e30)
        return ops.softmax(scores)

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
        if not training or not self.num_dropped:
            return None
        rows = 1 if self.dropout_scope == "batch" else ops.shape(queries)[0]
        entries = self.num_neighbors
        draws = keras.random.uniform((entries,), seed=self.seed_generator)
        ranks = ops.argsort(draws)
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
            "metric": self.metric,
            "temperature": self.temperature,
            "value_scale": self.value_scale,
            "fixed_values": self.fixed_values,
            "dropout": self.dropout,
            "dropout_scope": self.dropout_scope,
            "key_initializer": keras.initializers.serialize(self.key_initializer),
            "value_initializer": keras.initializers.serialize(self.value_initializer),
            "seed": self.seed,
        }


@functools.lru_cache(maxsize=64)
def _coprimes(size: int) -> tuple[int, ...]:
    """Numbers below `size` (and small enough) that share no factor with it."""
    # The largest product is (size - 1) * multiplier + (size - 1).
    largest = min(size, _LARGEST_PRODUCT // size)
    return tuple(n for n in range(1, max(largest, 2)) if math.gcd(n, size) == 1)
