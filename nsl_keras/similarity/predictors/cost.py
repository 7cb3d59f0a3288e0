"""What predictors cost, beside the layers that they serve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras

from nsl_keras import rewiring


def multiply_adds(network: keras.layers.Layer | None) -> int:
    """Returns the multiply-adds of a predictor or adaptation at one of its positions."""
    layers = [network, *rewiring.sublayers(network)] if network else []
    return sum(math.prod(each.kernel.shape) for each in layers if hasattr(each, "kernel"))


def cost_ratio(layer: Any) -> float:
    """Returns the multiply-adds of what predicts a layer's `M`, over the plain layer's."""
    block = getattr(layer.predictor, "downsampling", 1) ** len(layer.kernel_size)
    predicted = multiply_adds(layer.predictor) / block + multiply_adds(layer.adaptation)
    return predicted / math.prod(layer.kernel.shape)


def name_costly(ratios: Mapping[str, float | None]) -> str | None:
    """Says which predictors cost more than the layers they serve.

    Args:
        ratios: Multiply-adds of a layer's predictor over those of the plain layer, by the
            layer's name; `None` where that is not known.

    Returns:
        A sentence, or `None` if there are none.
    """
    costly = [
        f"{name!r} ({ratio:.1f} times)"
        for name, ratio in ratios.items()
        if ratio is not None and ratio > 1
    ]
    if not costly:
        return None
    return (
        "Predictors take more multiply-adds than the plain layers that they serve in "
        f"{', '.join(costly)}. `hidden_filters` of `SimilarityPredictor` sets their width; "
        "`downsampling` sets at how many positions they predict."
    )
