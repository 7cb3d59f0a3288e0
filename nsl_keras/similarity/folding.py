"""Folds models with static similarities into plain Keras models: `fold`."""

from __future__ import annotations

from typing import Any

import keras

from nsl_keras import graphs, validation
from nsl_keras.copying import copied
from nsl_keras.nesting import forget_functions, sublayers
from nsl_keras.similarity.neural_similarity import similarities_of
from nsl_keras.turning import Foldable


def fold(model: keras.Model, inplace: bool = False) -> keras.Model:
    """Returns an uncompiled Keras model that computes the same as one with similarities.

    Each layer with a neural similarity becomes the Keras layer that it generalizes, with
    the equivalent kernel `M^T D W` (`D` is the learned shape), and
    `nsl_keras.layers.BatchNormalization` becomes Keras's. A `nsl_keras.layers.CosineDense`,
    such as the nearest centroid that `few_shot` adapted with cosines, becomes a Sequential
    of a normalization to unit length and a `keras.layers.Dense`. The file of the model then
    loads with Keras alone, unless it contains the support sets of other metric learners or
    the `few_shot.ClassLogits` of an adapted model, which stay. Graph, names and `trainable`
    flags stay too: to train further, unfreeze what `add_similarity` froze.

    Args:
        model: A built model that Keras can save, or with `inplace` any built model. In a
            `MetaNeighborhoodModel`, the backbone alone is folded.
        inplace: bool, whether to change `model` itself and return it; not for models that
            contain a `CosineDense`. Compile it again, and also any other model on its
            layers that has run, whose functions still contain `M`. Otherwise the two models
            share no weights. LoRA is merged either way; in place it stays enabled and
            starts anew.

    Raises:
        ValueError: If `model` is not built, or contains layers of this package that cannot
            be folded, such as dynamic similarities; the message names them.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> model = nsl_keras.backbones.convnet4(
    ...     (16, 16, 3), convolution=nsl_keras.layers.NeuralSimilarityConv2D)
    >>> plain = nsl_keras.convert.fold(model)
    >>> images = keras.random.normal((2, 16, 16, 3), seed=0)
    >>> bool(keras.ops.max(keras.ops.abs(plain(images) - model(images))) < 1e-5)
    True

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 4.
    """
    validation.boolean(inplace, "inplace")
    root = graphs.root_of(model)
    layers = graphs.layers(root) or root.layers
    unfoldable = [
        f"{layer.name!r} ({_obstacle(layer)}{type(layer).__name__})"
        for layer in layers
        if not is_foldable(layer)
        or (_is_replaced(layer) and (root is not model or inplace))
    ]
    demand = (
        "one with a plain Keras equivalent: of this package's layers, only static "
        "similarities of floats, `BatchNormalization` and `CosineDense` (not in a "
        "backbone, and not with `inplace=True`) have one"
    )
    validation.require(not unfoldable, "model", demand, ", ".join(unfoldable))
    folded: Any = model if inplace else copied(model)
    root = graphs.root_of(folded)
    new = {id(each): each.fold() for each in graphs.layers(root) if _is_replaced(each)}
    for part in [*sublayers(root)]:
        if isinstance(part, Foldable):
            part.turn_back()
    forget_functions(folded)
    return graphs.replayed(folded, new) if new else folded


def is_foldable(layer: keras.layers.Layer) -> bool:
    """Whether `fold` accepts a layer: it is plain, or has a plain equivalent.

    Derived classes have none, because they may compute something else.
    """
    parts = [layer, *sublayers(layer)]
    kin = [part for part in parts if "plain" in vars(type(part))]
    inside = {id(each) for part in kin for each in sublayers(part)}
    ours = [
        part
        for part in parts
        if is_ours(part) and not getattr(part, "stays_in_fold", id(part) in inside)
    ]
    has_kin = _is_replaced(layer) or all(part in kin for part in ours)
    return has_kin and not _obstacle(layer)


def _obstacle(layer: keras.layers.Layer) -> str:
    """Returns what keeps a similarity in a layer from folding, or an empty string."""
    kin = [part for part in (layer, *sublayers(layer)) if isinstance(part, Foldable)]
    quantized = any(getattr(part, "quantization_mode", None) for part in kin)
    if any(form.predictor is not None for form in similarities_of(layer)):
        return "dynamic "
    return "quantized " if quantized else ""


def _is_replaced(layer: keras.layers.Layer) -> bool:
    """Whether other layers take the place of a layer, which its `fold` returns."""
    folds = "fold" in vars(type(layer)) and not isinstance(layer, Foldable)
    return folds and is_ours(layer)


def is_ours(layer: keras.layers.Layer) -> bool:
    """Whether a layer's class is, or derives from, a class of this package."""
    return any(base.__module__.startswith("nsl_keras.") for base in type(layer).__mro__)
