"""Adds neural similarities to plain models: `add_similarity`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import ops

from nsl_keras import graphs, nesting, similarities, validation
from nsl_keras.backend.built_layers import set_autocast
from nsl_keras.copying import copied
from nsl_keras.similarity.convolution import (
    NeuralSimilarityConv1D,
    NeuralSimilarityConv2D,
    NeuralSimilarityConv3D,
    NeuralSimilarityDepthwiseConv2D,
    NeuralSimilaritySeparableConv2D,
)
from nsl_keras.similarity.transposed import NeuralSimilarityConv2DTranspose
from nsl_keras.turning import turned

Layer: TypeAlias = keras.layers.Layer

#: The kin of each Keras layer. Only layers of exactly these types are converted, because
#: derived classes may compute something else.
KIN: dict[type[Layer], Any] = {
    kind.plain: kind
    for kind in (
        NeuralSimilarityConv1D,
        NeuralSimilarityConv2D,
        NeuralSimilarityConv2DTranspose,
        NeuralSimilarityConv3D,
        NeuralSimilarityDepthwiseConv2D,
        NeuralSimilaritySeparableConv2D,
    )
}


def add_similarity(
    model: keras.Model,
    similarity: Any = "diagonal",
    predictor: Any = None,
    layers: Collection[str] | Callable[[Layer], bool] | None = None,
    freeze_backbone: bool = True,
) -> keras.Model:
    """Returns a new model, not compiled, whose convolutions have a neural similarity.

    The new model, Sequential if `model` is, has the weights of `model` and, before
    training, its outputs: every `M` starts at the identity. `model` itself does not change,
    and the two share no weights.

    `Conv1D`, `Conv2D`, `Conv3D`, `Conv2DTranspose`, `DepthwiseConv2D` and `SeparableConv2D`
    (its depthwise kernel) are converted, also in nested models and inside
    `TimeDistributed`; derived classes and all other layers stay as they are, and so do
    graph, names, dtype policies, regularizers and shared layers.

    Args:
        model: A built functional or Sequential model; of a `MetaNeighborhoodModel` the
            backbone is converted.
        similarity: See `nsl_keras.layers.NeuralSimilarityConv2D`, for example
            `similarities.Diagonal(learn_shape=True)`.
        predictor: See `nsl_keras.layers.NeuralSimilarityConv2D`. A
            `nsl_keras.predictors.SharedSimilarityPredictor`, which must be new, needs
            kernels of the same size; other recipes make a network for each layer.
        layers: Which convolutions to convert: a collection of names, or a function that
            takes a layer and returns a bool. `None` converts all whose kernel has more than
            one tap (position). Grouped convolutions take no predictor, and depthwise
            convolutions no `"full"` similarity.
        freeze_backbone: bool, whether to train only the new similarities and predictors.
            All other layers are then frozen, including the classifier, and batch norms run
            in inference mode. (A `MetaNeighborhoodModel` still trains its head and
            dictionary.) To train the classifier too, set its `trainable`. To finetune the
            whole network later, set `trainable` of every layer, and `kernel_trainable` of
            layers with a similarity.

    Raises:
        ValueError: If `model` is subclassed or not built, if `layers` chooses none or
            names a layer that is not convertible, if `predictor` is in use, or if an
            argument does not fit a layer.

    Warns:
        UserWarning: If the outputs may change, because a `nsl_keras.similarities.Sparse`
            has fewer nonzeros than taps, or a predictor has `start="published"` or is a
            custom layer.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> plain = nsl_keras.backbones.convnet4((16, 16, 3))
    >>> model = nsl_keras.convert.add_similarity(plain)
    >>> images = keras.random.normal((2, 16, 16, 3), seed=0)
    >>> bool(keras.ops.all(model(images) == plain(images)))
    True
    >>> {variable.name for variable in model.trainable_variables}
    {'similarity'}

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 4.
    """
    similarity = similarities.get(similarity)
    is_new = getattr(predictor, "shared_network", None) is None
    demand = "a new `SharedSimilarityPredictor`, which no layer uses"
    validation.require(is_new, "predictor", demand, predictor)
    validation.boolean(freeze_backbone, "freeze_backbone")
    places = _chosen(model, similarity, predictor, layers)
    copy = copied(model)
    graph = graphs.graph_of(copy)
    held = graphs.layers(graph)
    chosen: list[Any] = [held[place] for place in places]
    for layer in chosen:
        with turned(layer, KIN[type(layer)]) as input_shape:
            layer.set_similarity(
                similarity, predictor, layer.trainable and not freeze_backbone
            )
            # `M^T W` is computed in the dtype of the variables.
            set_autocast(layer.kernel, False)
            layer.build_similarity(input_shape)
    _warn_of_changes(chosen)
    new = {*chosen, *(each for layer in chosen for each in nesting.sublayers(layer))}
    for layer in nesting.sublayers(graph):
        if layer in chosen:
            layer.trainable = True  # If it was frozen, only its kernel stays frozen.
        elif freeze_backbone and new.isdisjoint([layer, *nesting.sublayers(layer)]):
            layer.trainable = False
    nesting.unfreeze_holders(graph, chosen)
    return copy


def _chosen(model: Any, similarity: Any, predictor: Any, layers: Any) -> list[int]:
    """Returns the places of the layers to convert in `graphs.layers`."""
    found: list[Any] = graphs.layers(graphs.graph_of(model))
    suited = {
        place: layer
        for place, layer in enumerate(found)
        if type(layer) in KIN and _suits(layer, similarity, predictor)
    }
    names = {layer.name for layer in suited.values()}
    if layers is None:
        chooses: Any = lambda layer: math.prod(layer.kernel_size) > 1  # noqa: E731
    else:
        chooses = layers if callable(layers) else lambda layer: layer.name in layers
    chosen = [place for place, layer in suited.items() if chooses(layer)]
    is_known = layers is None or callable(layers) or names.issuperset(layers)
    if not chosen or not is_known:
        kinds = dict.fromkeys(type(each).__name__ for each in found)
        raise ValueError(
            "`layers` must choose one or more layers of the types "
            f"{', '.join(each.__name__ for each in KIN)} that the similarity "
            f"suits: {', '.join(map(repr, sorted(names))) or 'there are none'}. Received: "
            f"layers={layers!r}, and model {model.name!r} of {', '.join(kinds)}"
        )
    for layer in (suited[place] for place in chosen):
        if not all(map(nesting.has_plain_kernel, (layer, *nesting.sublayers(layer)))):
            raise ValueError(
                "`layers` must choose layers without LoRA and quantization. "
                f"Received: layer {layer.name!r} of type {type(layer).__name__!r}"
            )
    return chosen


def _suits(layer: Any, similarity: similarities.Similarity, predictor: Any) -> bool:
    if predictor is not None and getattr(layer, "groups", 1) > 1:
        return False
    return similarity.shared_by_channels or not hasattr(layer, "depth_multiplier")


def _warn_of_changes(layers: list[Any]) -> None:
    """Warns unless `M` is known to start at the identity."""
    changed = [layer.name for layer in layers if not _starts_at_identity(layer)]
    if changed:
        warnings.warn(
            "The outputs of the model may change: `M` does not start at the identity, or "
            f"has a custom predictor, in {', '.join(map(repr, changed))}. Outputs are "
            "unchanged if the similarity can represent the identity, and the predictor has "
            "`start='identity'`.",
            stacklevel=3,  # The line that calls `add_similarity`.
        )


def _starts_at_identity(layer: Any) -> bool:
    form = layer.bilinear_form
    if layer.predictor is None:
        matrix = form.similarity_matrix
    else:
        recipe = getattr(layer.predictor, "predictor", layer.predictor)  # Shared or not.
        if not isinstance(getattr(recipe, "kind", None), str) or recipe.start != "identity":
            return False
        matrix = form.similarity.matrix(ops.convert_to_tensor(form.identity), form.taps)
    matrix = ops.convert_to_numpy(matrix)
    return np.allclose(matrix, np.eye(matrix.shape[-1]), atol=1e-6)
