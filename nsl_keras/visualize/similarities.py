"""Similarity matrices, masks and kernel shapes, one panel a layer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras.similarity.matrices import Diagonal
from nsl_keras.similarity.neural_similarity import NeuralSimilarity
from nsl_keras.visualize.figures import Figure, new_figure


def plot_similarities(model: keras.Model) -> Figure:
    """Draws what was learned of every similarity in a model: `M`, and kernel shapes.

    A diagonal similarity is drawn as the mask it puts on the kernel's taps, any other
    as its matrix `M[t, u]`; a learned kernel shape as the taps it keeps. White is 0, the
    identity's ones are mid-scale. Three-dimensional kernels are drawn slice under slice.

    Args:
        model: A built Keras model with static neural similarity layers, or with layers
            that learn their kernel's shape; nested models included.

    Returns:
        A matplotlib figure, one panel a matrix or shape.

    Raises:
        ValueError: If the model has no such layer.

    Example:

    >>> import keras
    >>> import nsl_keras
    >>> model = nsl_keras.backbones.convnet4(
    ...     (8, 8, 1), convolution=nsl_keras.layers.NeuralSimilarityConv2D)
    >>> len(nsl_keras.visualize.plot_similarities(model).axes) >= 4
    True

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Sections 3.1 and 3.5.
    """
    panels = [
        panel
        for layer in _layers_of(model)
        if isinstance(layer, NeuralSimilarity)
        for panel in _panels_of(layer)
    ]
    if not panels:
        raise ValueError(
            "`model` must have static neural similarity layers, or layers that learn their "
            f"kernel's shape. Received: model={model.name!r} without any"
        )
    largest = max(2.0, *(float(np.abs(values).max()) for _, values in panels))
    figure = new_figure(figsize=(2.6 * len(panels) + 0.8, 3.0))
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, values) in zip(axes, panels, strict=True):
        image = axis.imshow(values, cmap="RdBu", vmin=-largest, vmax=largest)
        axis.set_title(title, fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
        if values.size <= 25:
            for (row, column), value in np.ndenumerate(values):
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def _panels_of(layer: NeuralSimilarity) -> list[tuple[str, np.ndarray]]:
    """Titles and pictures of what a layer has learned."""
    if not layer.built:
        raise ValueError(f"`model` must be built. Received: unbuilt layer {layer.name!r}")
    grid = getattr(layer, "kernel_size", (-1,))
    picture = (-1, grid[-1]) if len(grid) > 1 else (1, -1)
    panels = []
    if layer.predictor is None:
        matrix = ops.convert_to_numpy(layer.similarity_matrix)
        if isinstance(layer.similarity, Diagonal):
            panels.append((f"{layer.name}\nmask", matrix.diagonal().reshape(picture)))
        else:
            panels.append((f"{layer.name}\nM", matrix))
    if layer.learn_shape:
        shape = ops.convert_to_numpy(layer.learned_shape)
        panels.append((f"{layer.name}\nshape", shape.reshape(picture)))
    return panels


def _layers_of(model: Any) -> list[keras.layers.Layer]:
    """All layers of a model, those of nested models included."""
    layers = []
    for layer in model.layers:
        layers += _layers_of(layer) if hasattr(layer, "layers") else [layer]
    return layers
