"""The pieces that the backbones are made of: convolutions, batch norm with iFiLM."""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras import validation
from nsl_keras.neighborhoods.film import InstanceFiLM
from nsl_keras.similarity.convolution import NeuralSimilarityConv2D
from nsl_keras.similarity.predictors import SimilarityPredictor

Tensor = Any


def convolution(
    filters: int,
    kernel_size: int,
    *,
    similarity: Any = None,
    predictor: Any = None,
    momentum: float = 0.9,
    synchronized: bool = False,
    **options: Any,
) -> keras.layers.Layer:
    """Returns a "same" convolution without bias, plain or with a neural similarity.

    A predictor given by name has the strides and regularizer of the convolution, and
    batch norms with `momentum`.
    """
    options = {"padding": "same", "use_bias": False, **options}
    if similarity is None and predictor is None:
        return keras.layers.Conv2D(filters, kernel_size, **options)
    if isinstance(predictor, str):
        predictor = SimilarityPredictor(
            kernel_size,
            kind=predictor,
            similarity=similarity or "diagonal",
            strides=options.get("strides", 1),
            padding=options["padding"],
            momentum=momentum,
            synchronized=synchronized,
            kernel_regularizer=options.get("kernel_regularizer"),
            name=f"{options['name']}_predictor",
        )
    return NeuralSimilarityConv2D(
        filters,
        kernel_size,
        similarity=similarity or "diagonal",
        predictor=predictor,
        **options,
    )


def normalize(
    inputs: Tensor,
    *,
    momentum: float,
    synchronized: bool,
    film: int | None,
    name: str,
) -> Tensor:
    """Returns batch-normalised inputs, modulated by iFiLM where `film` entries are given.

    Channels stand where `keras.config.image_data_format()` says.
    """
    validation.fraction(momentum, "batch_normalization_momentum")
    axis = -1 if keras.config.image_data_format() == "channels_last" else 1
    outputs = keras.layers.BatchNormalization(
        axis=axis,
        momentum=momentum,
        epsilon=1e-3,
        synchronized=synchronized,
        name=f"{name}_normalization",
    )(inputs)
    if film is not None:
        outputs = InstanceFiLM(film, axis=axis, name=f"{name}_film")(outputs)
    return outputs
