"""Public metrics: how near a query is to a key."""

from nsl_keras.neighborhoods.key_metrics import (
    Cosine as Cosine,
    Euclidean as Euclidean,
    KeyMetric as KeyMetric,
    get as get,
)
