"""Public metrics: how near a query is to a key."""

from nsl_keras.neighborhoods.key_metrics import Cosine, Euclidean, KeyMetric, get

__all__ = ["Cosine", "Euclidean", "KeyMetric", "get"]
