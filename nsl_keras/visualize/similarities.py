"""A picture of all static similarities and kernel shapes in a model."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.similarities import Diagonal
from nsl_keras.similarity.neural_similarity import similarities_of
from nsl_keras.visualize import figures

#: The maximum of panels in a row.
_MOST_COLUMNS = 6

#: The smallest difference to the identity with the darkest colors.
LEAST_SCALE = 1e-2


def plot_similarities(model: keras.Model) -> figures.Figure:
    """Draws every static similarity `M` and learned kernel shape in a model, each a panel.

    A diagonal similarity is drawn as a mask on the kernel's taps (positions), any other
    similarity as its matrix `M[t, u]`, and a learned kernel shape as the taps that it
    keeps. Colors show the difference to the identity: blue is more, red is less. Numbers
    are the entries themselves. Three-dimensional kernels are drawn slice under slice.

    Args:
        model: A built Keras model with static neural similarity layers or recurrent
            cells, or with layers that learn their kernel's shape; nested models included.

    Raises:
        ValueError: If the model has no such layer, or is not built.

    Example:

    >>> import nsl_keras
    >>> model = nsl_keras.backbones.convnet4(
    ...     (8, 8, 1), convolution=nsl_keras.layers.NeuralSimilarityConv2D)
    >>> figure = nsl_keras.visualize.plot_similarities(model)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Sections 3.1 and 3.5.
    """
    panels = [
        (f"{_title_of(part, model)}\n{caption}", numbers, changes)
        for part in similarities_of(model)
        for caption, numbers, changes in _panels_of(part)
    ]
    demand = "a model with static neural similarities, or with learned kernel shapes"
    validation.require(panels, "model", demand, model.name)
    columns = min(len(panels), _MOST_COLUMNS)
    rows = math.ceil(len(panels) / columns)
    lines = max(title.count("\n") for title, _, _ in panels)
    figure = figures.new_figure(1.9 * columns + 1.0, (2.1 + 0.15 * lines) * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    scale = max(LEAST_SCALE, *(float(np.abs(changes).max()) for *_, changes in panels))
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, numbers, changes) in zip(axes.flat, panels, strict=False):
        drawn = figures.draw_matrix(axis, changes, scale, numbers)
        axis.set_anchor("N")  # Room for the title is measured from where the panel ends.
        axis.set_title(title, fontsize=7)
    figures.add_color_bar(figure, drawn, axes, "difference to the identity")
    return figure


def _title_of(part: Any, model: keras.Model) -> str:
    """Returns the path of a similarity in a model, broken into short lines."""
    path = part.path.removeprefix(f"{model.name}/").removesuffix("/bilinear_form")
    names = path.split("/")
    lines = [textwrap.fill(name.replace("_", " "), 24) for name in names]
    return "\n".join(lines).replace(" ", "_")


def _panels_of(part: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Returns captions, numbers, and their differences to the identity."""
    panels = []
    if part.predictor is None:
        matrices = ops.convert_to_numpy(part.similarity_matrix).astype("float32")
        for matrix in matrices.reshape(-1, *matrices.shape[-2:]):
            if isinstance(part.similarity, Diagonal):
                mask = _on_taps(matrix.diagonal(), part)
                panels.append(("mask of the taps", mask, mask - 1))
            else:
                changes = matrix - np.eye(len(matrix))
                panels.append(("M[t, u]: t down, u right", matrix, changes))
    if part.similarity.learn_shape:
        shape = _on_taps(ops.convert_to_numpy(part.learned_shape), part)
        panels.append(("taps that are kept", shape, shape - 1))
    return panels


def _on_taps(values: np.ndarray, part: Any) -> np.ndarray:
    """Returns one number per tap, in rows as in the kernel."""
    return values.reshape(-1, getattr(part, "kernel_size", values.shape)[-1])
