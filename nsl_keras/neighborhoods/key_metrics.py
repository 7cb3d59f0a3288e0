"""How near a query is to a key: the `sim` of the attention over a dictionary."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, TypeVar

import keras
from keras import ops

from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.neighborhoods.cosine import unit_norm
from nsl_keras.registry import ClassNames


class KeyMetric(abc.ABC):
    """How near queries are to keys: a function of all pairs, larger where they are nearer.

    A metric of one's own is a subclass with `call`. Registered under a name by
    `nsl_keras.key_metrics.register`, it serves wherever a `metric` is asked for.

    Call arguments:
        queries: Tensor of shape `(..., queries, features)`.
        keys: Tensor of shape `(..., keys, features)`.

    Output shape:
        `(..., queries, keys)`, in float32 or wider.

    Attributes:
        defined_at_zero: bool, whether an all-zero vector is near to some and far from
            others. Where it is not, dictionaries refuse all-zero keys.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> @nsl_keras.key_metrics.register("example_inner_product")
    ... class InnerProduct(nsl_keras.key_metrics.KeyMetric):
    ...     def call(self, queries, keys):
    ...         return keras.ops.matmul(queries, keras.ops.swapaxes(keys, -1, -2))
    >>> layer = nsl_keras.layers.NeighborDictionary(
    ...     20, num_values=3, metric="example_inner_product")
    >>> tuple(layer(keras.ops.ones((2, 5))).shape)
    (2, 20)
    """

    defined_at_zero = True

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        queries = at_least_float32(queries)
        return self.call(queries, ops.cast(ops.convert_to_tensor(keys), queries.dtype))

    @abc.abstractmethod
    def call(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns how near each query is to each key; both have one dtype."""

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> KeyMetric:
        """Builds the metric from `get_config()`."""
        return cls(**config)


_NAMES = ClassNames("metric", KeyMetric, "nsl_keras.key_metrics.KeyMetric")

_Kind = TypeVar("_Kind", bound=type[KeyMetric])


def register(name: str) -> Callable[[_Kind], _Kind]:
    """Returns a class decorator that gives a `KeyMetric` a name.

    The name serves as `metric` argument and in files. A file that holds it loads once the
    class is registered again.

    Args:
        name: Name of the metric.

    Raises:
        ValueError: If the name is taken by another class.

    Example:

    See `KeyMetric`.

    >>> import nsl_keras
    >>> type(nsl_keras.key_metrics.get("euclidean")).__name__
    'Euclidean'
    """

    return _NAMES.register(name)


@register("cosine")
@keras.saving.register_keras_serializable("nsl_keras")
class Cosine(KeyMetric):
    """The cosine of the angle between query and key.

    Example:

    >>> import nsl_keras
    >>> metric = nsl_keras.key_metrics.Cosine()
    >>> float(metric([[3.0, 4.0]], [[2.0, 0.0]])[0, 0])
    0.6000000238418579

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.3, Similarity Metrics.
    """

    defined_at_zero = False

    def call(self, queries: Tensor, keys: Tensor) -> Tensor:
        return ops.matmul(unit_norm(queries), ops.swapaxes(unit_norm(keys), -1, -2))


@register("euclidean")
@keras.saving.register_keras_serializable("nsl_keras")
class Euclidean(KeyMetric):
    """Minus the squared Euclidean distance: `-||q - k||^2`.

    Computed as `2 q.k - q.q - k.k` of vectors less the mean of the keys: distances do not
    shift, and far from zero the three terms would cancel.

    Example:

    >>> import nsl_keras
    >>> metric = nsl_keras.key_metrics.Euclidean()
    >>> float(metric([[3.0, 4.0]], [[0.0, 0.0]])[0, 0])
    -25.0

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.3, Similarity Metrics.
    """

    def call(self, queries: Tensor, keys: Tensor) -> Tensor:
        # No derivative: where the centre is changes nothing.
        center = ops.stop_gradient(ops.mean(keys, axis=-2, keepdims=True))
        queries, keys = queries - center, keys - center
        return (
            2 * ops.matmul(queries, ops.swapaxes(keys, -1, -2))
            - ops.sum(ops.square(queries), axis=-1, keepdims=True)
            - ops.sum(ops.square(keys), axis=-1)[..., None, :]
        )


def get(identifier: str | dict[str, Any] | KeyMetric) -> KeyMetric:
    """Returns a metric by name, from its serialized form, or as it is.

    Args:
        identifier: `"cosine"`, `"euclidean"`, a registered name, a dictionary from
            `serialize`, or a `KeyMetric`.

    Returns:
        A `KeyMetric`.

    Raises:
        ValueError: If the name is unknown; the message lists the known ones.

    Example:

    >>> import nsl_keras
    >>> type(nsl_keras.key_metrics.get("cosine")).__name__
    'Cosine'
    """
    metric: KeyMetric = _NAMES.instance(identifier)
    return metric


def serialize(metric: KeyMetric) -> str | dict[str, Any]:
    """Returns a metric as a name, or as Keras serializes objects.

    Args:
        metric: A `KeyMetric`.

    Returns:
        What `get` takes back.

    Example:

    >>> import nsl_keras
    >>> nsl_keras.key_metrics.serialize(nsl_keras.key_metrics.Euclidean())
    'euclidean'
    """
    name_or_config: str | dict[str, Any] = _NAMES.serialize(metric)
    return name_or_config
