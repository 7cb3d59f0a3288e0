"""The networks of predictors, by the names of their kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import keras

from nsl_keras.registry import Names

if TYPE_CHECKING:
    from nsl_keras.similarity.predictors.base import Predictor

Network = Callable[["Predictor"], list[keras.layers.Layer]]

#: The networks of the predictors that layers make from a name.
KINDS = Names("predictor")


def register(name: str) -> Callable[[Network], Network]:
    """Returns a decorator that gives a predictor's network a name.

    Layers then take the name as `predictor=`, and predictors as `kind=`. The function is
    given the predictor and returns its layers, called one after the other. Each becomes an
    attribute of the predictor under its own name. It may make them with these methods, or
    in any other way:

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
