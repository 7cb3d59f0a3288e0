"""How near queries are to keys: the cosine, or minus the squared Euclidean distance."""

from __future__ import annotations

from keras import ops

from nsl_keras.backend import Tensor, at_least_float32
from nsl_keras.neighborhoods.unit_norm import unit_norm

METRICS = ("cosine", "euclidean")


def key_similarity(queries: Tensor, keys: Tensor, metric: str) -> Tensor:
    """Returns `cos(q, k)`, or `-||q - k||^2`, of all pairs, in float32 or wider.

    Args:
        queries: Tensor of shape `(..., queries, features)`.
        keys: Tensor of shape `(..., keys, features)`.
        metric: `"cosine"` or `"euclidean"`.

    Returns:
        Tensor of shape `(..., queries, keys)`.
    """
    queries = at_least_float32(queries)
    keys = ops.cast(ops.convert_to_tensor(keys), queries.dtype)
    if metric == "cosine":
        return ops.matmul(unit_norm(queries), ops.swapaxes(unit_norm(keys), -1, -2))
    return (
        2 * ops.matmul(queries, ops.swapaxes(keys, -1, -2))
        - ops.sum(ops.square(queries), axis=-1, keepdims=True)
        - ops.sum(ops.square(keys), axis=-1)[..., None, :]
    )
