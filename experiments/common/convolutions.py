"""What makes the convolutions of a network, and how wide plain networks are like them."""

import bisect
import functools
from collections.abc import Callable
from typing import Any

import keras

import nsl_keras
from experiments.common.multiply_adds import multiply_adds

#: By their names in the paper.
SIMILARITIES = {"DNS": "diagonal", "UNS": "unconstrained"}


def convolutions(
    similarity: Any = None,
    predictor: Any = None,
    momentum: float = 0.9,
    published: bool = False,
    **options: Any,
) -> Callable[..., keras.layers.Layer]:
    """Returns what backbones take as `convolution`; plain ones without a similarity.

    `predictor` is the `kind` of one in each layer, `"shared"` for one in all, with
    `"shared_by_size"` also of its adaptations to maps of one size, `None` for a static
    similarity; `momentum` is that of their batch norms. `published` predictors are the
    authors' but for the momentum, others the package's but for the `options`.
    """
    if similarity is None:
        return keras.layers.Conv2D
    options = {"start": "published" if published else "identity", **options}
    make, own = nsl_keras.predictors.SimilarityPredictor, None
    if predictor in ("shared", "shared_by_size"):
        # The authors released no code for it: the width and the start of the others.
        by_size = predictor == "shared_by_size"
        own = nsl_keras.predictors.SharedSimilarityPredictor(
            make(**options), share_adaptations=by_size
        )
    elif predictor is not None:
        options = {"batch_normalization": {"momentum": momentum}, **options}
        own = make(predictor, **options)
    return functools.partial(
        nsl_keras.layers.NeuralSimilarityConv2D, similarity=similarity, predictor=own
    )


@keras.saving.register_keras_serializable("experiments")
def depthwise(
    recipe: nsl_keras.predictors.SimilarityPredictor, context: Any
) -> list[keras.layers.Layer]:
    """The layers of a predictor whose first one is depthwise: a `kind`."""
    return [
        keras.layers.DepthwiseConv2D(**context.geometry, use_bias=False),
        nsl_keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.ReLU(),
        *recipe.output(context, batch_normalized=True),
    ]


def nearest_width(size: Callable[[int], int], target: int, widths: range) -> int:
    """The width with the size nearest to a target; sizes grow with widths."""
    size = functools.cache(size)
    above = bisect.bisect_left(widths, target, key=size)
    return min(widths[above - 1 : above + 1], key=lambda width: abs(size(width) - target))


def size_of(model: keras.Model) -> dict[str, int]:
    return {
        "parameters": sum(int(keras.ops.size(each)) for each in model.trainable_variables),
        "multiply_adds": multiply_adds(model)[0],
    }
