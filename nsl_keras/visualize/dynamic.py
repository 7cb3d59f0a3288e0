"""A picture of the similarity that a dynamic layer predicts for one image."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops, tree

from nsl_keras import validation
from nsl_keras.similarities import Diagonal
from nsl_keras.visualize import figures
from nsl_keras.visualize.similarities import LEAST_SCALE


def plot_dynamic_similarity(
    model: keras.Model, image: Any, layer: str | None = None
) -> figures.Figure:
    """Draws the similarity that a dynamic layer predicts for one image.

    The left shows the image, and the distance of `M` from the identity at each output
    position (root mean square). In the middle, one map per tap (position of the kernel)
    shows how far its diagonal entry `M[t, t]` is above (blue) or below (red) 1. The right
    shows the `M` furthest from the identity, at the position with a cross; a diagonal `M`
    is drawn as a mask on the kernel's taps.

    Args:
        model: A built functional or Sequential model with dynamic two-dimensional
            convolutions, or a model whose `backbone` is such a model. To draw a layer of a
            nested model, pass the nested model.
        image: One input as the model takes it, without batch axis, or a list or dict of
            inputs. The first input that is an image is drawn.
        layer: Name of the layer; `None` takes the first dynamic layer.

    Raises:
        ValueError: If the model has no such layer; the message names the dynamic layers.

    Example:

    >>> import functools
    >>> import numpy as np
    >>> import nsl_keras
    >>> dynamic = functools.partial(
    ...     nsl_keras.layers.NeuralSimilarityConv2D, predictor="sphere")
    >>> model = nsl_keras.backbones.convnet4((8, 8, 1), 4, convolution=dynamic)
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
    differences = matrices - np.eye(matrices.shape[-1])
    of_taps = differences.diagonal(axis1=-2, axis2=-1)
    distances = np.sqrt(np.mean(differences**2, axis=(-2, -1)))
    place = np.unravel_index(distances.argmax(), distances.shape)
    scale = max(LEAST_SCALE, float(np.abs(differences).max()))
    height, width = chosen.kernel_size

    widths = [2.9, 1.4 * max(width, 2), 3.2]
    figure = figures.new_figure(sum(widths), 1.4 * max(height, 3) + 0.7)
    figure.suptitle(f"{chosen.name} for one image", fontsize=10)
    left, middle, right = figure.subfigures(1, 3, width_ratios=widths)

    above, below = left.subplots(2, 1)
    figures.draw_image(above, picture, figures.display_range(picture), "image")
    colors = {"cmap": "cividis", "vmin": 0, "vmax": max(LEAST_SCALE, distances.max())}
    drawn = below.imshow(distances, **colors, interpolation="nearest")
    below.set_axis_off()
    figures.add_color_bar(left, drawn, below, "distance to the identity")
    center = np.asarray(place) + 0.5
    pixels = np.divide(picture.shape[:2], distances.shape)
    for axis, (row, column) in ((below, center), (above, center * pixels)):
        axis.plot(column - 0.5, row - 0.5, "x", color=figures.ORANGE, ms=8, mew=2)

    maps = middle.subplots(height, width, squeeze=False)
    for axis, of_tap in zip(maps.flat, np.moveaxis(of_taps, -1, 0), strict=True):
        figures.draw_matrix(axis, of_tap, scale)
    middle.suptitle("diagonal entry of each tap", fontsize=9)

    shown, numbers, title = differences[place], matrices[place], "M"
    if isinstance(chosen.similarity, Diagonal):
        shown = of_taps[place].reshape(height, width)
        numbers, title = shown + 1, "mask"
    axis = right.subplots()
    drawn = figures.draw_matrix(axis, shown, scale, numbers)
    axis.set_title(f"{title} at the cross", fontsize=9)
    figures.add_color_bar(right, drawn, axis, "difference to the identity")
    return figure


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
