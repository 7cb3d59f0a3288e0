"""What predictors cost, beside their layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras

from nsl_keras.similarity.predictors import Scale, SharedSimilarityPredictor


def multiply_adds(
    network: keras.layers.Layer, input_shape: tuple[int | None, ...]
) -> float:
    """Returns the multiply-adds of a predictor for one example; NaN if not known."""
    if isinstance(network, SharedSimilarityPredictor):
        network = network.shared_network
    if isinstance(network, keras.Sequential):
        total = 0.0
        for layer in network.layers:
            total += multiply_adds(layer, input_shape)
            input_shape = tuple(layer.compute_output_shape(input_shape))
        return total
    if not hasattr(network, "kernel"):
        is_known = all(len(weight.shape) < 2 for weight in network.weights)
        return 0.0 if is_known or isinstance(network, Scale) else math.nan
    outputs = list(network.compute_output_shape(input_shape))[1:]
    first = getattr(network, "data_format", "") == "channels_first"
    del outputs[0 if first else -1]
    sizes = (math.nan if size is None else size for size in outputs)
    return math.prod(network.kernel.shape) * math.prod(sizes)


def cost_ratio(layer: Any) -> float:
    """Returns the multiply-adds of what predicts a layer's `M`, over the plain layer's."""
    shape = layer.get_build_config()["input_shape"]
    # Where a size is not known, one that is large beside the kernel.
    shape = tuple(64 if size is None else size for size in shape)
    plain = multiply_adds(layer, shape)
    return multiply_adds(layer.comparison.network, shape) / plain


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
        f"{', '.join(costly)}. `width` of `SimilarityPredictor` sets their width; "
        "`downsampling` sets at how many positions they predict."
    )
