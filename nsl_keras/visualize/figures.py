"""What all pictures share: images and names, figures, colors, and matrices."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from nsl_keras import nesting, validation
from nsl_keras.training import data

#: Two colors that color-blind readers can distinguish, and a gray.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#8C8C8C"


def images_in(model: Any, x: Any) -> np.ndarray | None:
    """Returns the first inputs that are images, as `(n, height, width, channels)`.

    The axis of the channels is that of the first layer with a data format, by default that
    of `keras.config.image_data_format()`.
    """
    images = next((each for each in data.leaves(x) if each.ndim == 4), None)
    formats = (getattr(layer, "data_format", None) for layer in nesting.sublayers(model))
    layout = next(filter(None, formats), keras.config.image_data_format())
    if images is None or layout == "channels_last":
        return images
    return np.moveaxis(images, 1, -1)


def require_images(model: Any, x: Any, name: str) -> Any:
    """Returns `images_in` the inputs, and raises if there are none."""
    images = images_in(model, x)
    shapes = [each.shape for each in data.leaves(x)]
    demand = "images, of shape (n, height, width, channels), or hold some"
    validation.require(images is not None, name, demand, shapes)
    return images


def batch_of_one(example: Any) -> Any:
    """Returns one input, of any structure, as a batch."""
    return data.map_arrays(lambda part: part[None], data.gather(example)[0])


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure, with its size in inches."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise ImportError(
            "`nsl_keras.visualize` needs matplotlib: `pip install matplotlib`."
        ) from error
    return plt.figure(figsize=(width, height), layout="constrained", dpi=150)


def display_range(*stacks: np.ndarray) -> tuple[float, float]:
    """Returns the black and white values of all images in a figure.

    These are the lowest and highest values, but at most 0 and at least 1 (255 for bytes).
    """
    low = min(float(stack.min()) for stack in stacks)
    high = max(float(stack.max()) for stack in stacks)
    are_bytes = all(stack.dtype == "uint8" for stack in stacks)
    return min(low, 0.0), max(high, 255.0 if are_bytes else 1.0)


def draw_image(
    axis: Any,
    image: np.ndarray,
    values: tuple[float, float],
    text: str = "",
    color: str = "black",
) -> None:
    """Draws an image, gray unless it has 3 or 4 channels, and a text below it."""
    low, high = values
    shown = (np.asarray(image, "float32") - low) / (high - low)
    if shown.shape[-1] not in (3, 4):
        shown = shown.mean(axis=-1)
    axis.imshow(shown, cmap="gray", vmin=0, vmax=1)
    axis.set(xticks=[], yticks=[])
    axis.set_xlabel(text, fontsize=8, labelpad=2, color=color)


def draw_matrix(
    axis: Any, changes: np.ndarray, scale: float, numbers: np.ndarray | None, aspect: str
) -> Any:
    """Draws a matrix of changes in colors from red (`-scale`) through white to blue.

    Writes `numbers` on the colors, and returns the argument of `add_color_bar`.
    """
    drawn = axis.imshow(changes, cmap="RdBu", vmin=-scale, vmax=scale, aspect=aspect)
    axis.set(xticks=[], yticks=[])
    for (row, column), number in np.ndenumerate([] if numbers is None else numbers):
        color = "white" if abs(changes[row, column]) > 0.6 * scale else "black"
        options = {"ha": "center", "va": "center", "fontsize": 7, "color": color}
        axis.text(column, row, f"{np.round(number, 3) + 0.0:.3f}", **options)
    return drawn


def add_color_bar(figure: Any, drawn: Any, axes: Any, label: str) -> None:
    """Adds the scale of colors on the right of some axes."""
    bar = figure.colorbar(drawn, ax=axes, aspect=25)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)
