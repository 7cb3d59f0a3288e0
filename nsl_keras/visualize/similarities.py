"""Pictures of similarities: all static ones in a model, and a dynamic one for an image."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
from keras import ops, tree

from nsl_keras import validation
from nsl_keras.similarities import Diagonal
from nsl_keras.similarity.with_similarity import forms_in
from nsl_keras.visualize import figures

#: The maximum number of panels in a row, and of entries in a matrix with numbers.
_MOST_COLUMNS, _MOST_NUMBERED = 6, 25

#: The darkest color stands for a difference to the identity of at least this much.
_LEAST_SCALE = 1e-2

#: A title, the numbers of a matrix or mask, and what they are without a similarity.
Panel: TypeAlias = tuple[str, np.ndarray, np.ndarray]


def plot_similarities(model: keras.Model) -> Any:
    """Draws every static similarity `M` and learned kernel shape in a model, each a panel.

    A diagonal similarity is drawn as a mask on the kernel's taps (positions), any other
    similarity as its matrix `M[t, u]`, and a learned kernel shape as the taps that it
    keeps. Colors show the difference to the identity: blue is more, red is less. Numbers
    are the entries themselves. Three-dimensional kernels are drawn slice under slice.

    Args:
        model: A built Keras model that contains, at any depth, static similarities or
            layers that learn their kernel's shape.

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
        (f"{_path_of(part, model)}\n{caption}", numbers, identity)
        for part in forms_in(model)
        for caption, numbers, identity in _panels_of(part)
    ]
    demand = "a model with static neural similarities, or with learned kernel shapes"
    validation.require(panels, "model", demand, model.name)
    return _draw_panels(panels, min(len(panels), _MOST_COLUMNS))[0]


def plot_dynamic_similarity(
    model: keras.Model, image: Any, layer: str | None = None
) -> Any:
    """Draws the similarity that a dynamic layer predicts for one image.

    The first row shows the image, the largest difference between `M` and the identity at
    each output position, and the `M` at the position where it is largest, marked by a
    cross. Below, one map per tap (position of the kernel) shows how far its diagonal entry
    `M[t, t]` is above (blue) or below (red) 1.

    Args:
        model: A built functional or Sequential model with dynamic two-dimensional
            convolutions, or a model whose `backbone` is such a model. To draw a layer of a
            nested model, pass the nested model.
        image: One input without batch axis, or a list or dict of inputs. The first input
            that is an image is drawn.
        layer: Name of the layer; `None` takes the first dynamic layer.

    Raises:
        ValueError: If the model has no such layer; the message names the dynamic layers.

    Example:

    >>> import keras
    >>> import numpy as np
    >>> import nsl_keras
    >>> layer = nsl_keras.layers.NeuralSimilarityConv2D(4, 3, predictor="sphere")
    >>> model = keras.Sequential([keras.Input((8, 8, 1)), layer])
    >>> image = np.random.default_rng(0).random((8, 8, 1))
    >>> figure = nsl_keras.visualize.plot_dynamic_similarity(model, image)

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3, Eq. (3).
    """
    batch = figures.batch_of_one(image)
    picture = figures.require_images(model, batch, "image")[0]
    network = getattr(model, "backbone", None) or model
    chosen = _dynamic_layer(network, layer)
    inputs = keras.Model(network.inputs, chosen.input)(tree.flatten(batch), training=False)
    predicted = chosen.predicted_matrices(inputs)
    matrices = ops.convert_to_numpy(predicted)[0].astype("float32")
    identity = np.eye(matrices.shape[-1])
    of_taps = (matrices - identity).diagonal(axis1=-2, axis2=-1)
    distances = np.abs(matrices - identity).max(axis=(-2, -1))
    place = np.unravel_index(distances.argmax(), distances.shape)
    title, numbers, identity = _panel_of(matrices[place], chosen)
    # The first row starts with room for the image; the rows of taps below are the kernel's.
    change = "largest change", distances, np.zeros_like(distances)
    panels: list[Panel | None]
    panels = [None, change, (f"at the cross: {title}", numbers, identity)]
    columns = max(chosen.kernel_size[1], len(panels))
    panels += [None] * (columns - len(panels))
    panels += [
        (f"M[{tap}, {tap}]", 1 + of_tap, np.ones_like(of_tap))
        for tap, of_tap in enumerate(np.moveaxis(of_taps, -1, 0))
    ]
    figure, (seen, distance, *_) = _draw_panels(panels, columns)

    figure.suptitle(f"{chosen.name} for one image", fontsize=10)
    figures.draw_image(seen, picture, figures.display_range(picture))
    center = np.asarray(place) + 0.5
    pixels = np.divide(picture.shape[:2], distances.shape)
    for axis, (row, column) in ((distance, center), (seen, center * pixels)):
        axis.plot(column - 0.5, row - 0.5, "x", color=figures.ORANGE, ms=8, mew=2)
    return figure


def _path_of(part: Any, model: keras.Model) -> str:
    """Returns the path of a similarity in a model, a layer on each line."""
    path = part.path.removeprefix(f"{model.name}/").removesuffix("/bilinear_form")
    return str(path.replace("/", "\n"))


def _dynamic_layer(network: Any, name: str | None) -> Any:
    """Returns the layer with a name, or the first that can be drawn."""
    found = {
        each.name: each
        for each in network.layers
        if getattr(each, "predictor", None) is not None and getattr(each, "rank", 0) == 2
    }
    demand = "a model with a dynamic two-dimensional convolution"
    validation.require(found, "model", demand, network.name)
    validation.one_of(name, (None, *found), "layer")
    return next(iter(found.values())) if name is None else found[name]


def _panels_of(part: Any) -> list[Panel]:
    panels = []
    if part.predictor is None:
        matrices = ops.convert_to_numpy(part.similarity_matrix).astype("float32")
        square = matrices.reshape(-1, *matrices.shape[-2:])
        panels = [_panel_of(matrix, part) for matrix in square]
    if part.similarity.learn_shape:
        shape = _on_taps(ops.convert_to_numpy(part.learned_shape), part)
        panels.append(("taps that are kept", shape, np.ones_like(shape)))
    return panels


def _panel_of(matrix: np.ndarray, part: Any) -> Panel:
    if not isinstance(part.similarity, Diagonal):
        return "M[t, u]: t down, u right", matrix, np.eye(len(matrix))
    mask = _on_taps(matrix.diagonal(), part)
    return "mask of the taps", mask, np.ones_like(mask)


def _on_taps(values: np.ndarray, part: Any) -> np.ndarray:
    """Returns one number per tap, in rows as in the kernel."""
    return values.reshape(-1, getattr(part, "kernel_size", values.shape)[-1])


def _draw_panels(panels: Sequence[Panel | None], columns: int) -> tuple[Any, Any]:
    """Returns a figure of panels, and its axes, which are empty for a panel `None`."""
    rows = math.ceil(len(panels) / columns)
    drawn = [panel for panel in panels if panel]
    lines = max(title.count("\n") for title, _, _ in drawn)
    figure = figures.new_figure(1.9 * columns + 1.0, (2.1 + 0.15 * lines) * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    scale = max(_LEAST_SCALE, *(np.abs(each - one).max() for _, each, one in drawn))
    for axis, panel in itertools.zip_longest(axes.flat, panels):
        if panel is None:
            axis.set_axis_off()
            continue
        title, numbers, identity = panel
        few = numbers if numbers.size <= _MOST_NUMBERED else None
        aspect = "auto" if len(numbers) == 1 else "equal"
        colors = figures.draw_matrix(axis, numbers - identity, scale, few, aspect)
        axis.set_title(title, fontsize=7)
    figures.add_color_bar(figure, colors, axes, "difference to the identity")
    return figure, axes.flat
