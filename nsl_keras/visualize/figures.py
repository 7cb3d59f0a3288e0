"""What all pictures share: images and names, figures, colors, grids, and matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from nsl_keras import nesting, validation
from nsl_keras.training import data

#: `matplotlib.figure.Figure` and `matplotlib.axes.Axes`. Matplotlib is optional, and
#: imported when the first picture is drawn.
Figure: TypeAlias = Any
Axes: TypeAlias = Any

#: Two colors that color-blind readers can distinguish, and a gray.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#8C8C8C"

#: The maximum of entries in a matrix with numbers, and of columns drawn as squares.
_MOST_NUMBERED, _MOST_SQUARES = 25, 32

#: Images with larger values than this contain bytes.
_LEAST_OF_BYTES = 64


def images_in(model: Any, x: Any) -> np.ndarray | None:
    """Returns the first inputs that are images, as `(n, height, width, channels)`.

    The first layer with a data format says which axis has the channels, and without such a
    layer `keras.config.image_data_format()`.
    """
    images = next((each for each in data.leaves(x) if each.ndim == 4), None)
    formats = (getattr(layer, "data_format", None) for layer in nesting.sublayers(model))
    layout = next(filter(None, formats), keras.config.image_data_format())
    if images is None or layout == "channels_last":
        return images
    return np.moveaxis(images, 1, -1)


def require_images(model: Any, x: Any, name: str) -> np.ndarray:
    """Returns the images among the inputs, and raises if there are none."""
    images: Any = images_in(model, x)
    shapes = [each.shape for each in data.leaves(x)]
    demand = "images, of shape (n, height, width, channels), or hold some"
    validation.require(images is not None, name, demand, shapes)
    return np.asarray(images)


def batch_of_one(example: Any) -> Any:
    """Returns one input, of any structure, as a batch."""
    return data.map_arrays(lambda part: part[None], data.gather(example)[0])


def require_neighbors(model: Any) -> None:
    """Raises unless a model has neighbors."""
    demand = "a `MetaNeighborhoodModel`, for example of `from_classifier`"
    validation.require(hasattr(model, "neighbors"), "model", demand, model)


def names_of(classes: int, class_names: Sequence[str] | None) -> list[str]:
    """Returns the names of the classes; by default their numbers."""
    names = range(classes) if class_names is None else class_names
    demand = f"{classes} names, one per class"
    validation.require(len(names) == classes, "class_names", demand, class_names)
    return [str(name) for name in names]


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of a size in inches."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        raise ImportError(
            "`nsl_keras.visualize` needs matplotlib: `pip install matplotlib`."
        ) from error
    return plt.figure(figsize=(width, height), layout="constrained", dpi=150)


def display_range(*stacks: np.ndarray) -> tuple[float, float]:
    """Returns the black and white values: 0 and 1, 0 and 255, or the lowest and highest."""
    low = min(float(stack.min()) for stack in stacks)
    high = max(float(stack.max()) for stack in stacks)
    if low < 0 or high > 255:
        return low, high if high > low else low + 1.0
    are_bytes = high > _LEAST_OF_BYTES or all(each.dtype == "uint8" for each in stacks)
    return 0.0, 255.0 if are_bytes else max(high, 1.0)


def draw_image(
    axis: Axes, image: np.ndarray, values: tuple[float, float], title: str = ""
) -> None:
    """Draws an image: three or four channels in colors, others as their mean in gray."""
    low, high = values
    shown = np.clip((np.asarray(image, "float32") - low) / (high - low), 0, 1)
    if shown.shape[-1] not in (3, 4):
        shown = shown.mean(axis=-1)
    axis.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axis.set(xticks=[], yticks=[])
    axis.set_title(title, fontsize=9)


def frame_bars(axis: Axes) -> None:
    """Leaves small labels and two sides of the frame around bars."""
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def grid_of_images(
    images: np.ndarray,
    found: np.ndarray,
    captions: np.ndarray,
    values: tuple[float, float],
    first_width: float = 1.0,
) -> tuple[Figure, np.ndarray, np.ndarray]:
    """Draws rows of the images with the numbers `found`, an empty panel before each row.

    Returns the figure, the empty panels, and the panels of the images.
    """
    rows, columns = found.shape
    figure = new_figure(max(0.95 * (columns + first_width) + 0.5, 4.5), 1.15 * rows + 0.7)
    widths = [first_width] + [1.0] * columns
    panels = figure.subplots(rows, columns + 1, squeeze=False, width_ratios=widths)
    drawn = zip(panels[:, 1:].flat, found.flat, captions.flat, strict=True)
    for axis, index, caption in drawn:
        draw_image(axis, images[index], values)
        axis.set_xlabel(caption, fontsize=8, labelpad=2)
    return figure, panels[:, 0], panels[:, 1:]


def draw_matrix(
    axis: Axes,
    changes: np.ndarray,
    scale: float,
    numbers: np.ndarray | None = None,
    table: bool = False,
) -> Any:
    """Draws a matrix of changes in colors: blue is up, red is down, white is none.

    A change of `scale` gets the darkest colors. Numbers, if they are few, show the two
    leading digits of `scale`. A table fills its axis, and shows the changes themselves.
    Returns the argument of `add_color_bar`.
    """
    aspect = "auto" if table or changes.shape[1] > _MOST_SQUARES else "equal"
    colors = {"cmap": "RdBu", "vmin": -scale, "vmax": scale}
    drawn = axis.imshow(changes, **colors, aspect=aspect, interpolation="nearest")
    axis.set(xticks=[], yticks=[])
    decimals = int(np.clip(1 - np.floor(np.log10(scale)), 2, 6))
    pattern = f"{{:{'+' if table else ''}.{decimals}f}}"
    numbers = changes if table else numbers
    if numbers is not None and (table or numbers.size <= _MOST_NUMBERED):
        for (row, column), number in np.ndenumerate(np.round(numbers, decimals) + 0.0):
            color = "white" if abs(changes[row, column]) > 0.6 * scale else "black"
            options = {"ha": "center", "va": "center", "fontsize": 7, "color": color}
            axis.text(column, row, pattern.format(number), **options)
    return drawn


def add_color_bar(figure: Figure, drawn: Any, axes: Any, label: str) -> None:
    """Adds the scale of colors to the right of some axes."""
    bar = figure.colorbar(drawn, ax=axes, aspect=25)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
