"""Folds static similarities into the kernels of plain layers: `fold`."""

from __future__ import annotations

import keras

from nsl_keras import graphs, validation
from nsl_keras.copying import copied
from nsl_keras.nesting import forget_functions, parts_of, sublayers
from nsl_keras.similarity.with_similarity import forms_in
from nsl_keras.turning import Foldable


def fold(model: keras.Model, inplace: bool = False) -> keras.Model:
    """Returns a model that computes the same with plain layers in place of similarities.

    Each layer with a static similarity becomes the Keras layer that it generalizes, with
    the equivalent kernel `M^T D W` (`D` is the learned shape), and
    `nsl_keras.layers.BatchNormalization` becomes Keras's. Other layers stay, and so do
    graph, names and `trainable` flags: to train further, unfreeze what `add_similarity`
    froze.

    Args:
        model: A built model that Keras can save, or with `inplace` any built model. In a
            `MetaNeighborhoodModel`, the backbone is folded.
        inplace: bool, whether to change `model` itself and return it. Compile it again,
            and any other model on its layers that has run: its functions still contain
            `M`. Otherwise it does not change, and shares no weights with the new one. LoRA
            is merged either way; in place it stays enabled, and starts anew.

    Returns:
        A model, not compiled. Its file loads with Keras alone unless it contains other
        layers of this package, such as the `few_shot.ClassLogits` of what `adapt` returns.

    Raises:
        ValueError: If `model` is not built, or a similarity is dynamic, quantized, or in a
            derived class, which may compute something else; the message names the layers.

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
    found = [*filter(None, map(_obstacle, sublayers(root)))]
    demand = "one whose similarities are static, of floats, and in no derived class"
    validation.require(not found, "model", demand, "; ".join(found))
    folded = model if inplace else copied(model)
    for part in [*sublayers(graphs.root_of(folded))]:
        if getattr(part, "has_plain_twin", False):
            part.fold_inplace()
    forget_functions(folded)
    return folded


def is_foldable(layer: keras.layers.Layer) -> bool:
    """Whether `fold` accepts each similarity in a layer."""
    return not any(map(_obstacle, parts_of(layer)))


def _obstacle(layer: keras.layers.Layer) -> str:
    """Returns what keeps a layer with a similarity from folding, or an empty string."""
    forms = forms_in(layer) if isinstance(layer, Foldable) else []
    obstacles = {
        "a dynamic": any(form.predictor is not None for form in forms),
        "a quantized": getattr(layer, "quantization_mode", None) is not None,
        "a derived": not getattr(layer, "has_plain_twin", True),
    }
    found = [name for name, holds in obstacles.items() if forms and holds]
    return f"{layer.name!r}, {found[0]} {type(layer).__name__}" if found else ""
