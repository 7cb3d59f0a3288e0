"""What a dynamic similarity makes of one image: `M` at every position."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops, tree

from nsl_keras import data, rewiring
from nsl_keras.similarity.comparison import NeuralSimilarity
from nsl_keras.similarity.matrices import Diagonal
from nsl_keras.visualize.figures import (
    Axes,
    Figure,
    decimals_for,
    display_range,
    draw_image,
    new_figure,
    require_images,
    write_on_cells,
)

#: Positions whose `M` is drawn, from the most to the least changed, and their marks.
_SHARES, _LETTERS = (1.0, 0.5, 0.0), "ABC"

#: Deviations from the identity that colours do not show less of.
_LEAST_SCALE = 1e-3

#: Inches of an entry of `M` or a mask, and how many of them are few enough for numbers.
_CELL, _MOST_NUMBERED = 0.4, 25


def plot_dynamic_similarity(
    model: keras.Model, image: Any, layer: str | None = None, invert: bool = False
) -> Figure:
    """Draws the similarity that a dynamic layer predicts for one image.

    To the left: the image, and how far `M` is from the identity at each output position
    (the root of the mean square of its entries' differences). In the middle: a map for each
    tap, where it stands in the kernel, of how much more (blue) or less (red) than 1 its own
    entry `M[t, t]` is. To the right: `M` itself at three positions, A where it is furthest
    from the identity, B in the middle, C nearest; a diagonal `M` as the mask it puts on the
    kernel's taps. White is the identity.

    Args:
        model: A built functional or Sequential model, or a `MetaNeighborhoodModel` with
            such a backbone, with dynamic two-dimensional convolutions.
        image: One input, without batch axis, as the model gets it; a list or dict of them
            for a model of several inputs. The first that is an image is drawn.
        layer: Name of the layer; `None` takes the first dynamic one.
        invert: bool, whether a grey image is drawn as a negative.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: If the model is subclassed or not built, or has no such layer; the
            message names those there are.

    Example:

    >>> import functools
    >>> import numpy as np
    >>> import nsl_keras
    >>> dynamic = functools.partial(
    ...     nsl_keras.layers.NeuralSimilarityConv2D, predictor="sphere")
    >>> model = nsl_keras.backbones.convnet4((8, 8, 1), 4, convolution=dynamic)
    >>> image = np.random.default_rng(0).random((8, 8, 1))
    >>> figure = nsl_keras.visualize.plot_dynamic_similarity(model, image)
    >>> figure.axes[0].get_title()
    'image'

    Reference:
        Neural Similarity Learning (Liu et al., NeurIPS 2019), Section 3.3, Eq. (3).
    """
    batch = tree.map_structure(lambda part: part[None], data.arrays_of(image))
    pictures = require_images(batch, "image")
    chosen = _dynamic_layer(model, layer)
    matrices = ops.convert_to_numpy(
        chosen.predicted_matrices(_input_of(model, chosen, batch))
    )[0].astype("float32")
    differences = matrices - np.eye(matrices.shape[-1])
    distances = np.sqrt(np.mean(differences**2, axis=(-2, -1)))
    order = np.argsort(distances, axis=None)
    places = [
        np.unravel_index(order[round(share * (len(order) - 1))], distances.shape)
        for share in (_SHARES if len(order) > 1 else _SHARES[:1])
    ]
    height, width = chosen.kernel_size
    of_taps = differences.diagonal(axis1=-2, axis2=-1)
    scale = max(_LEAST_SCALE, float(np.abs(differences).max()))
    identity = np.eye(matrices.shape[-1])
    is_mask = isinstance(chosen.similarity, Diagonal)
    if is_mask:
        differences = of_taps.reshape(*distances.shape, height, width)
        identity = np.ones((height, width))

    inches = 1.5 * max(height, 3) + 0.7
    cell = min(_CELL, (inches / 3 - 0.5) / len(identity))
    widths = [
        2.7,
        max(1.45 * width + 0.2, 3.7),
        max(2.2, cell * identity.shape[1] + 1.0),
    ]
    figure = new_figure(figsize=(sum(widths), inches))
    figure.suptitle(f"What {chosen.name!r} makes of the image", fontsize=10)
    left, middle, right = figure.subfigures(1, 3, width_ratios=widths)
    _draw_positions(left, pictures[0], distances, places, invert)
    maps = middle.subplots(height, width, squeeze=False)
    for number, axis in enumerate(maps.flat):
        _draw_differences(axis, of_taps[..., number], scale)
    middle.suptitle("own entry of each tap, where it stands in the kernel", fontsize=9)
    panels = right.subplots(len(places), 1, squeeze=False)[:, 0]
    for axis, place, letter in zip(panels, places, _LETTERS, strict=False):
        drawn = _draw_differences(axis, differences[place], scale)
        _write_numbers(axis, differences[place], identity, scale, cell)
        axis.set_ylabel(f"at {letter}" if len(places) > 1 else "", fontsize=9)
    right.suptitle("mask" if is_mask else "M", fontsize=9)
    bar = right.colorbar(drawn, ax=panels, shrink=0.8, aspect=25)
    bar.set_label("difference to the identity", fontsize=8)
    _tidy(bar)
    return figure


def _draw_positions(
    figure: Figure, image: np.ndarray, distances: np.ndarray, places: Any, invert: bool
) -> None:
    """The image over the map of distances, with marks where `M` is drawn."""
    above, below = figure.subplots(2, 1)
    draw_image(above, image, display_range(image), invert)
    above.set_title("image", fontsize=9)
    drawn = below.imshow(
        distances,
        cmap="cividis",
        vmin=0,
        vmax=max(_LEAST_SCALE, float(distances.max())),
        interpolation="nearest",
    )
    below.set_xticks([])
    below.set_yticks([])
    below.set_title("distance of M\nto the identity", fontsize=9)
    _tidy(figure.colorbar(drawn, ax=below, shrink=0.8, aspect=15))
    if len(places) > 1:
        pixels = np.divide(image.shape[:2], distances.shape)
        for place, letter in zip(places, _LETTERS, strict=True):
            _mark(below, place, letter)
            _mark(above, (np.asarray(place) + 0.5) * pixels - 0.5, letter)


def _tidy(bar: Any) -> None:
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)


def _draw_differences(axis: Axes, values: np.ndarray, scale: float) -> Any:
    """Draws differences to the identity."""
    drawn = axis.imshow(
        values, cmap="RdBu", vmin=-scale, vmax=scale, interpolation="nearest"
    )
    axis.set_xticks([])
    axis.set_yticks([])
    return drawn


def _write_numbers(
    axis: Axes, differences: np.ndarray, identity: np.ndarray, scale: float, cell: float
) -> None:
    """Writes the entries of `M`, or of a mask, on their differences to the identity."""
    if identity.size > _MOST_NUMBERED:
        return
    decimals = min(decimals_for(scale), 3)
    # Without the sign of a zero.
    values = np.round(identity + differences, decimals) + 0.0
    fontsize = min(7.0, 105 * cell / (decimals + 3))
    write_on_cells(axis, f"{{:.{decimals}f}}".format, values, differences, scale, fontsize)


def _mark(axis: Axes, place: Any, letter: str) -> None:
    row, column = place
    axis.text(
        column,
        row,
        letter,
        ha="center",
        va="center",
        fontsize=7,
        weight="bold",
        bbox={"boxstyle": "circle,pad=0.15", "fc": "white", "ec": "black", "lw": 0.8},
    )


def _dynamic_layer(model: Any, name: str | None) -> Any:
    """The layer of a name, or the first that can be drawn."""
    found = {
        each.name: each
        for each in rewiring.layers(getattr(model, "backbone", model))
        if isinstance(each, NeuralSimilarity)
        and each.predictor is not None
        and getattr(each, "rank", 0) == 2
    }
    if not found or name not in (None, *found):
        raise ValueError(
            "`layer` must be a dynamic two-dimensional convolution of the model: "
            f"{', '.join(map(repr, found)) or 'there are none'}. Received: layer={name!r}"
        )
    return next(iter(found.values())) if name is None else found[name]


class _Recorder(keras.layers.Layer):
    """Passes its input on, and keeps it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seen: Any = None

    def call(self, inputs: Any) -> Any:
        self.seen = inputs
        return inputs

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape


def _input_of(model: Any, layer: Any, batch: Any) -> Any:
    """What a layer, of nested models too, gets when the model is called."""
    recorder = _Recorder(dtype=layer.dtype_policy)
    copy = rewiring.rebuild(
        getattr(model, "backbone", model),
        lambda each: [recorder, each] if each is layer else None,
    )
    copy(data.as_tensors(batch), training=False)
    return recorder.seen
