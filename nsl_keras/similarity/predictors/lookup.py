"""Predictors by name: those of a kind, and the authors'."""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras.similarity import matrices
from nsl_keras.similarity.predictors.convolutional import SimilarityPredictor
from nsl_keras.similarity.predictors.kinds import KINDS


def get(
    identifier: Any, predictor: type[keras.layers.Layer] | None = None, **kwargs: Any
) -> keras.layers.Layer | None:
    """Returns a predictor by the name of its kind, from its serialized form, or as it is.

    Args:
        identifier: `None`, the name of a kind, a dictionary from
            `keras.saving.serialize_keras_object`, or a layer.
        predictor: The class that a name makes, `None` for `SimilarityPredictor`.
        **kwargs: Arguments of that class besides `kind`, for a name; a layer has its own.

    Returns:
        A layer, or `None`.

    Raises:
        ValueError: If the name is unknown; the message lists the known ones.

    Example:

    >>> import nsl_keras
    >>> nsl_keras.predictors.get("sphere", hidden_filters=16).hidden_filters
    16
    """
    if isinstance(identifier, dict):
        identifier = keras.saving.deserialize_keras_object(identifier)
    if identifier is None or isinstance(identifier, keras.layers.Layer):
        return identifier
    if not isinstance(identifier, str) or identifier not in KINDS:
        raise ValueError(
            f"`predictor` must be None, one of {', '.join(map(repr, KINDS))}, or a layer. "
            f"Received: predictor={identifier!r}"
        )
    return (predictor or SimilarityPredictor)(
        kind=identifier, **{"name": "predictor", **kwargs}
    )


def published(
    kind: str = "sphere", similarity: Any = "diagonal", **kwargs: Any
) -> SimilarityPredictor:
    """Returns a predictor as the authors of Neural Similarity Learning have it.

    It has 64 hidden filters for the diagonal similarity and 128 for others, a scale of one
    at the last batch norm, and batch norms of the fixed momentum 0.999, whose moving
    statistics need thousands of steps.

    Args:
        kind: `"sphere"`, `"full_sphere"` or `"cnn"`.
        similarity: Name or `Similarity`, as in the layer served.
        **kwargs: Arguments of `SimilarityPredictor`, in place of those above too.

    Returns:
        A `SimilarityPredictor`.

    Example:

    >>> import nsl_keras
    >>> predictor = nsl_keras.predictors.published(similarity="unconstrained")
    >>> predictor.hidden_filters, predictor.momentum, predictor.start
    (128, 0.999, 'published')

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3.1 and the
        authors' code.
    """
    similarity = matrices.get(similarity)
    settings = {
        "hidden_filters": similarity.predictor_filters,
        "momentum": 0.999,
        "momentum_warmup": False,
        "start": "published",
        **kwargs,
    }
    return SimilarityPredictor(kind=kind, similarity=similarity, **settings)
