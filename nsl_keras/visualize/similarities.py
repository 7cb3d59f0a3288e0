"""Similarity matrices, masks and kernel shapes, one panel a layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from nsl_keras.similarity.comparison import Comparison
from nsl_keras.similarity.matrices import Diagonal
from nsl_keras.similarity.recurrent import similarities_of
from nsl_keras.visualize.figures import (
    GREY,
    Axes,
    Figure,
    decimals_for,
    new_figure,
    write_on_cells,
)

#: Panels side by side, and the largest matrix whose numbers fit into one.
_MOST_COLUMNS, _MOST_NUMBERED = 8, 25

#: The most taps of a line that are drawn as one.
_LONGEST_LINE = 32

#: What each kind of panel shows, and where its rows and columns come from.
_CAPTIONS = {
    "mask": "mask of the taps",
    "M": "M[t, u]: t down, u right",
    "shape": "taps that are kept",
}

#: Deviations from the identity that colours do not show less of.
_LEAST_SCALE = 1e-3


def plot_similarities(model: keras.Model) -> Figure:
    """Draws what was learned of every similarity in a model: `M`, and kernel shapes.

    A diagonal similarity is drawn as the mask it puts on the kernel's taps, any other
    as its matrix `M[t, u]`; a learned kernel shape as the taps it keeps. Colours are the
    difference to the identity, where training starts: white is no difference, blue more,
    red less. Numbers are those of the mask itself. Three-dimensional kernels are drawn
    slice under slice, more than 32 taps of a line row under row.

    Args:
        model: A built Keras model with static neural similarity layers or recurrent
            cells, or with layers that learn their kernel's shape; nested models included.

    Returns:
        A matplotlib figure, one panel a matrix or shape, in rows of at most eight.

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
    panels = []
    for layer in layers_of(model):
        parts = similarities_of(layer)
        for name, part in zip(_names_of(layer, parts), parts, strict=True):
            panels += _panels_of(name, part)
    if not panels:
        raise ValueError(
            "`model` must have static neural similarity layers, or layers that learn their "
            f"kernel's shape. Received: model={model.name!r} without any"
        )
    columns = min(len(panels), _MOST_COLUMNS)
    rows = math.ceil(len(panels) / columns)
    size = 1.9 if len(panels) <= 4 else 1.35
    titles = [_title_of(panel, size) for panel in panels]
    lines = max(2, *(1 + title.count("\n") for title in titles))
    height = size + 0.45 + 0.14 * (lines - 2)
    figure = new_figure(figsize=(size * columns + 1.0, height * rows))
    axes = figure.subplots(rows, columns, squeeze=False)
    scale = max(_LEAST_SCALE, *(panel.deviation for panel in panels))
    images = [
        _draw_panel(axis, panel, title, scale, size)
        for axis, panel, title in zip(axes.flat, panels, titles, strict=False)
    ]
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    matrices = [
        image for image, panel in zip(images, panels, strict=True) if not panel.is_shape
    ]
    if matrices:
        bar = figure.colorbar(matrices[0], ax=axes, shrink=min(0.8, 2.5 / rows), aspect=25)
        bar.set_label("difference to the identity", fontsize=8)
        bar.ax.tick_params(labelsize=8)
        bar.outline.set_visible(False)
    return figure


@dataclasses.dataclass(frozen=True)
class _Panel:
    """What was learned of one layer.

    Attributes:
        name: Name of the layer.
        kind: What the values are: `"mask"`, `"M"` or `"shape"`.
        values: The values, in two dimensions.
        identity: What they are where training starts.
    """

    name: str
    kind: str
    values: np.ndarray
    identity: np.ndarray

    @property
    def is_shape(self) -> bool:
        return self.kind == "shape"

    @property
    def deviation(self) -> float:
        """The largest difference to the identity that colours show."""
        if self.is_shape:
            return 0.0
        return float(np.abs(self.values - self.identity).max())


def _names_of(layer: keras.layers.Layer, parts: list[Comparison]) -> list[str]:
    """Names of a layer's similarities; where some are alike, with the parts around them."""
    names = [
        layer.name if part.name == "comparison" else f"{layer.name}_{part.name}"
        for part in parts
    ]
    if len(set(names)) == len(names):
        return names
    paths = [part.path.split("/") for part in parts]
    shared = set.intersection(*map(set, paths))
    return [
        "_".join([layer.name, *(each for each in path if each not in shared)])
        for path in paths
    ]


def _panels_of(name: str, part: Comparison) -> list[_Panel]:
    """What a similarity has learned."""
    if not part.built:
        raise ValueError(f"`model` must be built. Received: unbuilt layer {name!r}")
    grid = part.kernel_size
    panels = []
    if part.predictor is None:
        matrix = ops.convert_to_numpy(part.similarity_matrix).astype("float32")
        if isinstance(part.similarity, Diagonal):
            mask = _picture_of(matrix.diagonal(), grid)
            panels.append(_Panel(name, "mask", mask, np.ones_like(mask)))
        else:
            panels.append(_Panel(name, "M", matrix, np.eye(len(matrix))))
    if part.learn_shape:
        shape = _picture_of(ops.convert_to_numpy(part.learned_shape), grid)
        panels.append(_Panel(name, "shape", shape, np.ones_like(shape)))
    return panels


def _picture_of(taps: np.ndarray, grid: Sequence[int]) -> np.ndarray:
    """Numbers of the taps in rows: as in the kernel, or a long line folded."""
    if len(grid) > 1:
        return taps.reshape(-1, grid[-1])
    rows, count = 1, taps.size
    if count > _LONGEST_LINE:
        rows = max(each for each in range(1, math.isqrt(count) + 1) if count % each == 0)
    return taps.reshape(rows, -1)


def _title_of(panel: _Panel, size: float) -> str:
    return f"{_wrapped(panel.name, round(13 * size))}\n{_CAPTIONS[panel.kind]}"


def _draw_panel(axis: Axes, panel: _Panel, title: str, scale: float, size: float) -> Any:
    if panel.is_shape:
        options = {"cmap": "Greys", "vmin": -0.7, "vmax": 2.5}
        colored, decimals = 1 - panel.values, 0
    else:
        options = {"cmap": "RdBu", "vmin": -scale, "vmax": scale}
        colored, decimals = panel.values - panel.identity, min(decimals_for(scale), 4)
    rows, columns = colored.shape
    # Squares would be too small to be seen where many taps cannot be folded.
    aspect = "auto" if columns > _LONGEST_LINE and columns > 8 * rows else "equal"
    image = axis.imshow(colored, interpolation="nearest", aspect=aspect, **options)
    axis.set_anchor("N")  # Room for the title is measured from where the image ends.
    axis.set_title(title, fontsize=8 if size > 1.5 else 7)
    axis.set_xticks([])
    axis.set_yticks([])
    if panel.values.size > _MOST_NUMBERED and not panel.is_shape and not panel.deviation:
        middle = (np.array(panel.values.shape) - 1) / 2
        axis.text(*middle, "identity", ha="center", va="center", fontsize=8, color=GREY)
    if panel.values.size <= _MOST_NUMBERED:
        room = size * 72 / max(panel.values.shape[1], 3)
        fontsize = min(8.0, 1.4 * room / (decimals + 3))
        write_on_cells(
            axis, f"{{:.{decimals}f}}".format, panel.values, colored, scale, fontsize
        )
    return image


def _wrapped(name: str, width: int) -> str:
    """A name in lines of at most so many letters, where underscores let it break."""
    lines = [""]
    for part in name.split("_"):
        longer = f"{lines[-1]}_{part}" if lines[-1] else part
        if lines[-1] and len(longer) > width:
            lines[-1] += "_"
            lines.append(part)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def layers_of(model: Any) -> list[keras.layers.Layer]:
    """All layers of a model, those of nested models included."""
    layers = []
    for layer in model.layers:
        layers += layers_of(layer) if hasattr(layer, "layers") else [layer]
    return layers
