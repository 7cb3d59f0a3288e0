"""Metrics between queries and keys: the `sim` of the attention over a dictionary."""

from __future__ import annotations

import abc
from typing import Any

import keras
from keras import ops

from nsl_keras import configs, validation
from nsl_keras.backend import Tensor

NORM_EPSILON = 1e-12


def inverse_norm(tensor: Tensor, axis: int = -1) -> Tensor:
    """Returns `1 / sqrt(max(sum(a^2), 1e-12))` along `axis`, but 0 for zero vectors.

    For a zero vector, the formula's 1e6 would become a gradient that ruins the training.
    """
    squares = ops.sum(ops.square(tensor), axis=axis, keepdims=True)
    inverse = ops.rsqrt(ops.maximum(squares, NORM_EPSILON))
    return ops.where(squares > 0, inverse, 0)


class KeyMetric(abc.ABC):
    """A function of all pairs of queries and keys, higher for closer pairs.

    To write a metric, override `__call__`, and `get_config` if its constructor takes
    arguments. To save models that use it, register the class as in the example.

    Call arguments:
        queries: Tensor of shape `(..., queries, features)`, in float32 or wider.
        keys: Tensor of shape `(..., keys, features)`, in the same dtype.

    Output shape:
        `(..., queries, keys)`.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> @keras.saving.register_keras_serializable("examples")
    ... class InnerProduct(nsl_keras.key_metrics.KeyMetric):
    ...     def __call__(self, queries, keys):
    ...         return keras.ops.matmul(queries, keras.ops.swapaxes(keys, -1, -2))
    >>> layer = nsl_keras.layers.NeighborDictionary(20, 3, metric=InnerProduct())
    >>> tuple(layer(keras.ops.ones((2, 5))).shape)
    (2, 20)
    """

    @abc.abstractmethod
    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Returns the metric of each query and key."""

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {}

    from_config = classmethod(configs.from_arguments)


@keras.saving.register_keras_serializable("nsl_keras")
class Cosine(KeyMetric):
    """The cosine of the angle between query and key.

    Example:

    >>> import nsl_keras
    >>> metric = nsl_keras.key_metrics.Cosine()
    >>> round(float(metric([[3.0, 4.0]], [[2.0, 0.0]])[0, 0]), 6)
    0.6

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.3, Similarity Metrics.
    """

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        queries, keys = map(ops.convert_to_tensor, (queries, keys))
        inverse = ops.swapaxes(inverse_norm(keys), -1, -2)
        # The step of a dense head needs the same product: graphs compute it once.
        products = ops.matmul(queries, ops.swapaxes(keys, -1, -2))
        # Not by `*`, since queries and keys may have different dtypes.
        return ops.multiply(ops.multiply(products, inverse_norm(queries)), inverse)


@keras.saving.register_keras_serializable("nsl_keras")
class Euclidean(KeyMetric):
    """The negative Euclidean distance, squared by default: `-||q - k||^2`.

    It is computed as `2 q.k - q.q - k.k` after subtracting the mean key from queries and
    keys, so that large terms do not cancel.

    Args:
        squared: bool; if false, the metric is `-||q - k||`.

    Example:

    >>> import nsl_keras
    >>> metric = nsl_keras.key_metrics.Euclidean()
    >>> float(metric([[3.0, 4.0]], [[0.0, 0.0]])[0, 0])
    -25.0

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Section 2.3. The paper's "negative
        Euclidean distance" has no square; squared, the attention is a Gaussian kernel.
    """

    def __init__(self, squared: bool = True) -> None:
        self.squared = validation.boolean(squared, "squared")

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        # No derivative: the result does not depend on the center.
        center = ops.stop_gradient(ops.mean(keys, axis=-2, keepdims=True))
        queries, keys = queries - center, keys - center
        metric = (
            2 * ops.matmul(queries, ops.swapaxes(keys, -1, -2))
            - ops.sum(ops.square(queries), axis=-1, keepdims=True)
            - ops.sum(ops.square(keys), axis=-1)[..., None, :]
        )
        # A square root has no finite derivative at zero.
        return metric if self.squared else -ops.sqrt(ops.maximum(-metric, NORM_EPSILON))

    def get_config(self) -> dict[str, Any]:
        return {"squared": self.squared}


_BY_NAME = {"cosine": Cosine, "euclidean": Euclidean}


def get(identifier: str | dict[str, Any] | KeyMetric) -> KeyMetric:
    """Returns a metric by name, from its serialized form, or unchanged.

    Args:
        identifier: `"cosine"`, `"euclidean"`, a serialized metric, or a `KeyMetric`;
            anything else raises a `ValueError`.

    Example:

    >>> import nsl_keras
    >>> type(nsl_keras.key_metrics.get("cosine")).__name__
    'Cosine'
    """
    others = "or a `nsl_keras.key_metrics.KeyMetric`"
    return configs.named(identifier, "metric", _BY_NAME, KeyMetric, others)
