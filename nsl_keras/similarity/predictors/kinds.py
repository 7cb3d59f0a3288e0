"""Kinds of predictors: their networks, and predictors by the names of their kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from nsl_keras.similarity import matrices
from nsl_keras.similarity.predictors.base import KINDS, Predictor
from nsl_keras.similarity.predictors.convolutional import SimilarityPredictor

Network = Callable[[Predictor], list[keras.layers.Layer]]


def register(name: str) -> Callable[[Network], Network]:
    """Returns a decorator that gives a predictor's network a name.

    Layers then take the name as `predictor=`, and predictors as `kind=`. The function is
    given the predictor and returns its layers, called one after the other. Each becomes an
    attribute of the predictor under its own name, so that names of the predictor's other
    attributes are refused when it is built. It may make them with these methods, or in any
    other way:

    * `predictor.hidden(normalize, batch_normalized)`: a convolution or dense layer to the
      hidden width, and a batch norm if `batch_normalized` and nothing else was asked for;
      the layer goes by angle, with the norms `"both"`, `"input"` or `"kernel"`, or is plain
      for `None`;
    * `predictor.output(normalize, batch_normalized)`: the same to the `predictor.outputs`
      parameters of `M`, which starts at zero with `start="identity"`.

    Each returns a list of layers. A prediction must stand at each position of the layer
    served, or, with `downsampling`, at one for each block of them. The name goes into saved
    models; a process that loads one must have registered it.

    Args:
        name: The name.

    Raises:
        ValueError: If the name is taken by another function.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> @nsl_keras.predictors.register("tanh")
    ... def tanh(predictor):
    ...     activation = keras.layers.Activation("tanh", name="tanh")
    ...     return [*predictor.hidden("input"), activation, *predictor.output(None)]
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, predictor="tanh")
    >>> tuple(layer(keras.ops.ones((1, 8, 8, 2))).shape)
    (1, 6, 6, 4)
    """
    return KINDS.register(name)


@register("sphere")
def _sphere(predictor: Predictor) -> list[keras.layers.Layer]:
    normalized = predictor.similarity.predictor_batch_normalization
    return _with_relu(
        predictor, predictor.hidden("input", normalized), predictor.output(None, normalized)
    )


@register("full_sphere")
def _full_sphere(predictor: Predictor) -> list[keras.layers.Layer]:
    return _with_relu(
        predictor, predictor.hidden("both", True), predictor.output("both", True)
    )


@register("mlp")
@register("cnn")
def _plain(predictor: Predictor) -> list[keras.layers.Layer]:
    normalized = predictor.similarity.predictor_batch_normalization
    return _with_relu(
        predictor, predictor.hidden(None, normalized), predictor.output(None, True)
    )


def _with_relu(
    predictor: Predictor,
    hidden: list[keras.layers.Layer],
    output: list[keras.layers.Layer],
) -> list[keras.layers.Layer]:
    relu = keras.layers.ReLU(name="hidden_relu", dtype=predictor.dtype_policy)
    return [*hidden, relu, *output]


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
