"""Adds neural similarities to plain models: `add_similarity`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import ops

from nsl_keras import configs, nesting, rewiring, similarities, validation
from nsl_keras.similarity.convolution import (
    NeuralSimilarityConv1D,
    NeuralSimilarityConv2D,
    NeuralSimilarityConv3D,
    NeuralSimilarityDepthwiseConv2D,
)
from nsl_keras.similarity.transposed import NeuralSimilarityConv2DTranspose

Layer: TypeAlias = keras.layers.Layer

#: Only layers of exactly these types are converted, because derived classes may compute
#: something else.
_CONVERTIBLE: dict[type[Layer], Any] = {
    keras.layers.Conv1D: NeuralSimilarityConv1D,
    keras.layers.Conv2D: NeuralSimilarityConv2D,
    keras.layers.Conv2DTranspose: NeuralSimilarityConv2DTranspose,
    keras.layers.Conv3D: NeuralSimilarityConv3D,
    keras.layers.DepthwiseConv2D: NeuralSimilarityDepthwiseConv2D,
    # Only the depthwise part is converted.
    keras.layers.SeparableConv2D: NeuralSimilarityDepthwiseConv2D,
}


@rewiring.reaching_backbones
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

    `Conv1D`, `Conv2D`, `Conv3D`, `Conv2DTranspose`, `DepthwiseConv2D` and the depthwise
    part of `SeparableConv2D` are converted, also in nested models and inside
    `TimeDistributed`; derived classes and all other layers are copied. Names, dtype
    policies, regularizers and shared layers stay. A `SeparableConv2D` becomes two layers:
    the depthwise part, whose name ends in `_depthwise`, and a 1x1 convolution of the
    original name.

    Args:
        model: A built functional or Sequential model. A derived class is kept if its
            constructor is like Keras's. The backbone of a `MetaNeighborhoodModel` is
            converted.
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
            custom layer; and if the class of `model` cannot be kept.

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
    convertible = [
        layer
        for layer in rewiring.layers(model)
        if type(layer) in _CONVERTIBLE and _suits(layer, similarity, predictor)
    ]
    chosen = _chosen(model, convertible, layers)
    new = {"similarity": similarity, "predictor": predictor}
    chains = {id(layer): _converted(layer, freeze_backbone, **new) for layer in chosen}
    new_model = rewiring.rebuild(model, lambda layer: chains.get(id(layer)))
    for layer in chosen:
        _copy_weights(layer, chains[id(layer)])
    _warn_of_changes([chains[id(layer)][0] for layer in chosen])
    if freeze_backbone:
        similar = [chain[0] for chain in chains.values()]
        for each in rewiring.layers(new_model):
            parts = [each, *nesting.sublayers(each)]
            if not any(part in similar for part in parts):
                for part in parts:
                    part.trainable = False
    return new_model


def _suits(layer: Any, similarity: similarities.Similarity, predictor: Any) -> bool:
    if predictor is not None and getattr(layer, "groups", 1) > 1:
        return False
    return similarity.shared_by_channels or not hasattr(layer, "depth_multiplier")


def _chosen(model: keras.Model, convertible: list[Layer], layers: Any) -> list[Layer]:
    """Returns the layers to convert, in their order."""
    names = {layer.name for layer in convertible}
    if layers is None:
        chosen = [layer for layer in convertible if math.prod(layer.kernel_size) > 1]
    elif callable(layers):
        chosen = [layer for layer in convertible if layers(layer)]
    else:
        chosen = [layer for layer in convertible if layer.name in layers]
    is_known = layers is None or callable(layers) or names.issuperset(layers)
    if not chosen or not is_known:
        kinds = dict.fromkeys(type(each).__name__ for each in rewiring.layers(model))
        raise ValueError(
            "`layers` must choose one or more layers of the types "
            f"{', '.join(each.__name__ for each in _CONVERTIBLE)} that the similarity "
            f"suits: {', '.join(map(repr, sorted(names))) or 'there are none'}. Received: "
            f"layers={layers!r}, and model {model.name!r} of {', '.join(kinds)}"
        )
    return chosen


def _converted(layer: Layer, freeze_backbone: bool, **kwargs: Any) -> list[Layer]:
    """Returns the new layers that replace a convolution, without its weights."""
    config, pointwise = configs.with_functions(layer, layer.get_config()), []
    if isinstance(layer, keras.layers.SeparableConv2D):
        config, rest = _separated(config)
        pointwise = [keras.layers.Conv2D(**rest)]
    config |= {
        # If the layer was frozen, only its kernel stays frozen.
        "trainable": True,
        "kernel_trainable": layer.trainable and not freeze_backbone,
        **kwargs,
    }
    return [_CONVERTIBLE[type(layer)](**config), *pointwise]


def _separated(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the configs of the two convolutions that make a separable one."""
    depthwise = {
        key: value
        for key, value in config.items()
        if key != "filters" and not key.startswith("pointwise")
    }
    depthwise |= {
        "name": f"{config['name']}_depthwise",
        "use_bias": False,
        "activation": None,
        "activity_regularizer": None,
    }
    pointwise = {
        key.replace("pointwise", "kernel"): value
        for key, value in config.items()
        if not key.startswith("depth")
    }
    geometry = {"kernel_size": 1, "strides": 1, "dilation_rate": 1, "padding": "valid"}
    return depthwise, pointwise | geometry


def _copy_weights(source: Any, chain: list[Any]) -> None:
    """Sets the weights of the layers that replace `source`."""
    names = ["kernel"]
    if isinstance(source, keras.layers.SeparableConv2D):
        names = ["depthwise_kernel", "pointwise_kernel"]
    for layer, name in zip(chain, names, strict=True):
        rewiring.copy_value(getattr(source, name), layer.kernel)
        if layer.use_bias:
            rewiring.copy_value(source.bias, layer.bias)
        rewiring.copy_activations(source, layer)


def _warn_of_changes(layers: list[Any]) -> None:
    """Warns unless `M` is known to start at the identity."""
    changed = [layer.name for layer in layers if not _starts_at_identity(layer)]
    if changed:
        warnings.warn(
            "The outputs of the model may change: `M` does not start at the identity, or "
            f"has a custom predictor, in {', '.join(map(repr, changed))}. Outputs are "
            "unchanged if the similarity can represent the identity, and the predictor has "
            "`start='identity'`.",
            # The caller's line: `add_similarity` and its decorator stand between.
            stacklevel=4,
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
