"""Folds models with static similarities into plain Keras models: `fold`."""

from __future__ import annotations

from typing import Any, TypeAlias

import keras

from nsl_keras import configs, nesting, rewiring
from nsl_keras.similarity.neural_similarity import similarities_of
from nsl_keras.similarity.recurrent import SimilarityCell, SimilarityRecurrent, cells_of

Layer: TypeAlias = keras.layers.Layer


@rewiring.reaching_backbones
def fold(model: keras.Model) -> keras.Model:
    """Returns a plain Keras model that computes the same as a model with similarities.

    Each layer with a neural similarity becomes the Keras layer that it generalizes, with
    the equivalent kernel `M^T D W` (`D` is the learned shape). Recurrent cells and layers
    become Keras's own, `nsl_keras.layers.BatchNormalization` becomes Keras's, and
    `nsl_keras.layers.CosineDense` becomes a normalization to unit length and a
    `keras.layers.Dense`. Graph, names and `trainable` flags stay, so to train further,
    unfreeze what `add_similarity` froze. The model costs as much as the plain network.

    Args:
        model: A built functional or Sequential model. It does not change, and shares no
            weights with the new one. In a `MetaNeighborhoodModel`, the backbone is folded.

    Returns:
        A `keras.Model` without layers of this package, not compiled, whose file loads with
        Keras alone; for a `MetaNeighborhoodModel`, a new one with such a backbone.

    Raises:
        ValueError: If `model` is subclassed or not built, or if layers of this package
            cannot be folded, such as dynamic similarities; the message names them.

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
    unfoldable = [
        f"{layer.name!r} ({'dynamic ' if _is_dynamic(layer) else ''}{type(layer).__name__})"
        for layer in rewiring.layers(model)
        if not is_foldable(layer)
    ]
    if unfoldable:
        raise ValueError(
            "`model` must have a plain Keras equivalent: of this package's layers, only "
            "static similarities, `BatchNormalization` and `CosineDense` have one. "
            f"Received: {', '.join(unfoldable)}"
        )
    return rewiring.rebuild(model, _folded)


def is_foldable(layer: Layer) -> bool:
    """Whether `fold` accepts a layer: it is plain, or has a plain equivalent."""
    ours = [part for part in (layer, *nesting.sublayers(layer)) if _is_ours(part)]
    if not ours:
        return True
    # Derived classes may compute something else.
    are_exact = all(type(part).__module__.startswith("nsl_keras.") for part in ours)
    has_fold = layer in ours and hasattr(layer, "fold")
    return are_exact and (has_fold or bool(cells_of(layer))) and not _is_dynamic(layer)


def _is_ours(layer: Layer) -> bool:
    """Whether a layer's class is, or derives from, a class of this package."""
    return any(base.__module__.startswith("nsl_keras.") for base in type(layer).__mro__)


def _is_dynamic(layer: Layer) -> bool:
    return any(part.predictor is not None for part in similarities_of(layer))


def _folded(layer: Any) -> list[Layer] | None:
    """Returns the plain layers that replace a layer; `None` if it is plain."""
    if cells_of(layer):
        return [_folded_recurrent(layer)]
    return [layer.fold()] if _is_ours(layer) else None


def _folded_recurrent(layer: Any) -> Layer:
    """Returns a recurrent layer with plain cells in place of cells with a similarity."""
    if isinstance(layer, SimilarityRecurrent):  # One direction of a `Bidirectional`.
        return layer.fold()
    if isinstance(layer, keras.layers.Bidirectional):
        forward, backward = map(
            _folded_recurrent, (layer.forward_layer, layer.backward_layer)
        )
        sources = [forward, backward]
        folded = keras.layers.Bidirectional(
            forward,
            layer.merge_mode,
            backward_layer=backward,
            name=layer.name,
            dtype=layer.dtype_policy,
            trainable=layer.trainable,
        )
    elif not cells_of(layer):  # A plain direction.
        sources = [layer]
        folded = configs.remade(layer)
    else:
        stacked = isinstance(layer.cell, keras.layers.StackedRNNCells)
        sources = [
            cell.fold() if isinstance(cell, SimilarityCell) else cell
            for cell in (layer.cell.cells if stacked else [layer.cell])
        ]
        cells = [*map(configs.remade, sources)]
        config = {**layer.get_config(), "cell": cells if stacked else cells[0]}
        folded = keras.layers.RNN(**config)
    folded.build_from_config(layer.get_build_config())
    folded.set_weights([weight for each in sources for weight in each.get_weights()])
    return folded
