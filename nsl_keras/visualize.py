"""Pictures of what was learned: similarity matrices, and dictionary entries.

Every function returns a matplotlib figure (install `nsl_keras[visualize]`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.similarity.matrices import Diagonal
from nsl_keras.similarity.neural_similarity import NeuralSimilarity

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _new_figure(**options: Any) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            "`nsl_keras.visualize` needs matplotlib. Install it with "
            '`pip install "nsl_keras[visualize]"`.'
        ) from error
    return Figure(layout="constrained", **options)


def similarities(model: keras.Model) -> Figure:
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
    >>> model = nsl_keras.backbones.convnet4((8, 8, 1), similarity="diagonal")
    >>> len(nsl_keras.visualize.similarities(model).axes) >= 4
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
    figure = _new_figure(figsize=(2.6 * len(panels) + 0.8, 3.0))
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


def learned_neighbors(
    model: MetaNeighborhoodModel,
    images: Any,
    entries: Sequence[int] | None = None,
    nearest: int = 6,
    class_names: Sequence[str] | None = None,
) -> Figure:
    """Draws dictionary entries: their class probabilities, and the images nearest them.

    Nearness is the model's own metric between an entry's key and the images' features.

    Args:
        model: A built `MetaNeighborhoodModel`.
        images: Array of images, `(n, height, width, channels)` in [0, 1] or [0, 255].
        entries: Entry numbers to draw; `None` takes, for each class in turn, the entry
            that the images look at most.
        nearest: int, the number of images drawn for each entry.
        class_names: Names of the classes; `None` numbers them.

    Returns:
        A matplotlib figure, one row an entry.

    Raises:
        ValueError: If `nearest` exceeds the number of images, or an entry is not in the
            dictionary.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     nsl_keras.layers.CosineDense(3),
    ...     nsl_keras.backbones.convnet4((8, 8, 1)), num_neighbors=12)
    >>> images = np.random.default_rng(0).random((20, 8, 8, 1)).astype("float32")
    >>> model.build(images.shape)
    >>> len(nsl_keras.visualize.learned_neighbors(model, images, [0, 5]).axes)
    14

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Appendix A.8, Figures 9 and 10.
    """
    images = np.asarray(images)
    nearest = validation.positive_integer(nearest, "nearest")
    if nearest > len(images):
        raise ValueError(
            f"`nearest` must be at most the number of images, {len(images)}. "
            f"Received: nearest={nearest}"
        )
    attention = np.concatenate(
        [
            ops.convert_to_numpy(
                model.neighborhood.dictionary.attention(
                    model.features(ops.convert_to_tensor(batch), training=False)
                )
            )
            for batch in np.array_split(images, -(-len(images) // 256))
        ]
    )
    values = ops.convert_to_numpy(model.neighborhood.dictionary.values)
    size, classes = values.shape
    if entries is None:
        usage = attention.mean(axis=0)
        kinds = values.argmax(axis=1)
        entries = [
            int(np.flatnonzero(kinds == kind)[usage[kinds == kind].argmax()])
            for kind in range(classes)
            if (kinds == kind).any()
        ]
    if any(not 0 <= entry < size for entry in entries):
        raise ValueError(
            f"`entries` must be dictionary entries 0 to {size - 1}. "
            f"Received: entries={list(entries)}"
        )
    names = [str(k) for k in range(classes)] if class_names is None else class_names
    figure = _new_figure(figsize=(2.6 + 0.9 * nearest, 0.95 * len(entries)))
    rows = figure.subplots(
        len(entries),
        nearest + 1,
        squeeze=False,
        gridspec_kw={"width_ratios": [2.4] + [1] * nearest},
    )
    scale = 255.0 if images.max() > 1.5 else 1.0
    for entry, axes in zip(entries, rows, strict=True):
        top = int(values[entry].argmax())
        colors = [
            "tab:blue" if kind == top else "lightsteelblue" for kind in range(classes)
        ]
        axes[0].bar(range(classes), values[entry], color=colors)
        axes[0].set_ylim(0, 1)
        axes[0].set_yticks([])
        axes[0].set_xticks([top], [names[top]], fontsize=8)
        axes[0].set_ylabel(f"entry {entry}", fontsize=7)
        for axis, index in zip(
            axes[1:], np.argsort(-attention[:, entry])[:nearest], strict=True
        ):
            axis.imshow(np.squeeze(images[index]) / scale, cmap="gray_r", vmin=0, vmax=1)
            axis.set_axis_off()
    return figure


def _layers_of(model: Any) -> list[keras.layers.Layer]:
    """All layers of a model, those of nested models included."""
    layers = []
    for layer in model.layers:
        layers += _layers_of(layer) if hasattr(layer, "layers") else [layer]
    return layers
