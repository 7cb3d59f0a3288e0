"""What the pictures have in common: empty figures, colours, images, numbers and names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from keras import tree

#: `matplotlib.figure.Figure` and `matplotlib.axes.Axes`. Matplotlib is optional, and
#: imported when the first picture is drawn.
Figure: TypeAlias = Any
Axes: TypeAlias = Any

#: Dots per inch of a figure on the screen, and in a file that is no vector graphic.
DPI = 150

#: Two colours that no kind of colour blindness confuses, with a light one, and greys.
BLUE, ORANGE, LIGHT_BLUE, GREY = "#0072B2", "#D55E00", "#B5D4E9", "#8C8C8C"

#: Ten colours chosen to stay apart for colour-blind eyes (M. A. Petroff, 2021), and ten
#: shapes for those who see no colours at all.
_TEN_COLORS = [
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
]
MARKERS = ("o", "s", "^", "v", "D", "P", "X", "<", ">", "*")

#: Numbers of channels that tell where they are in a picture's shape.
_CHANNELS = (1, 3, 4)

#: The largest value above which images are taken for bytes: no other scale goes so far.
_LEAST_OF_BYTES = 64


def new_figure(**options: Any) -> Figure:
    """Returns an empty figure, which `plt.show()` shows."""
    try:
        import matplotlib.pyplot as plt

        from nsl_keras.visualize.shown_once import ShownOnce
    except ModuleNotFoundError as error:
        raise ImportError(
            "`nsl_keras.visualize` needs matplotlib. Install it with "
            '`pip install "nsl_keras[visualize]"`.'
        ) from error
    return plt.figure(FigureClass=ShownOnce, layout="constrained", dpi=DPI, **options)


def colors_of(classes: int) -> list[Any]:
    """A colour for each class: up to ten that differ, else steps of a colour map."""
    if classes <= len(_TEN_COLORS):
        return _TEN_COLORS[:classes]
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 1, classes)))


def markers_of(classes: int) -> list[str]:
    """A shape for each class; after ten they come again."""
    return [MARKERS[kind % len(MARKERS)] for kind in range(classes)]


def display_range(*stacks: np.ndarray) -> tuple[float, float]:
    """The values drawn as black and white: 0 to 1, 0 to 255, or all that images hold.

    The last is for images that were scaled otherwise: a model gets those it was trained
    on.
    """
    smallest = min(float(stack.min()) for stack in stacks)
    largest = max(float(stack.max()) for stack in stacks)
    if smallest < 0 or largest > 255:
        return smallest, largest if largest > smallest else smallest + 1.0
    return 0.0, 255.0 if largest > _LEAST_OF_BYTES else max(largest, 1.0)


def draw_image(
    axis: Axes, image: np.ndarray, values: tuple[float, float], invert: bool = False
) -> None:
    """Draws one image, of a stack with a `display_range`.

    One channel is drawn in grey, three or four as colours, others by their mean.
    """
    low, high = values
    shown = np.clip((np.asarray(image, "float32") - low) / (high - low), 0, 1)
    if shown.shape[-1] not in (3, 4):
        shown = shown.mean(axis=-1)
    axis.imshow(
        shown,
        cmap="gray_r" if invert else "gray",
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    axis.set_xticks([])
    axis.set_yticks([])


def write_on_cells(
    axis: Axes,
    write: Callable[[float], str],
    values: np.ndarray,
    colored: np.ndarray,
    scale: float,
    fontsize: float,
) -> None:
    """Writes the values of a matrix on its cells, in white on those that are dark.

    Args:
        axis: Where the matrix is drawn.
        write: How a value is written.
        values: The matrix.
        colored: What the cells' colours show, of the same shape.
        scale: What is drawn in the darkest colours, up and down.
        fontsize: Size of the letters, in points.
    """
    for (row, column), value in np.ndenumerate(values):
        axis.text(
            column,
            row,
            write(value),
            ha="center",
            va="center",
            fontsize=fontsize,
            color="white" if abs(colored[row, column]) > 0.6 * scale else "black",
        )


def is_image(example: Any) -> bool:
    """Whether an example has the shape of an image, `(height, width, channels)`."""
    return np.ndim(example) == 3 and min(np.shape(example)) > 0


def images_in(x: Any) -> np.ndarray | None:
    """The first of a model's inputs that are images, as `(n, h, w, channels)`."""
    found = (leaf for leaf in tree.flatten(x) if len(leaf) and is_image(leaf[0]))
    images = next(found, None)
    if images is None:
        return None
    first, last = np.shape(images)[1], np.shape(images)[-1]
    is_channels_first = first in _CHANNELS and last not in _CHANNELS and first < last
    return np.moveaxis(images, 1, -1) if is_channels_first else images


def require_images(x: Any, name: str) -> np.ndarray:
    """Returns the images among inputs, and raises where there are none."""
    images = images_in(x)
    if images is None:
        shapes = ", ".join(str(leaf.shape) for leaf in tree.flatten(x))
        raise ValueError(
            f"`{name}` must hold images, of shape (n, height, width, channels). "
            f"Received: {name} of shape {shapes}"
        )
    return images


def decimals_for(largest: float) -> int:
    """How many decimals show the two leading digits of the largest of some numbers."""
    if largest <= 0:
        return 2
    order = int(np.floor(np.log10(largest)))
    return int(np.clip(1 - order if order < 0 else 2 - order, 0, 9))


def signed(value: float, decimals: int) -> str:
    """A change as text: with its sign, and 0 for what rounds to it."""
    text = f"{value:+.{decimals}f}"
    return text if float(text) else "0"


def percentage(share: float) -> str:
    """A probability as text."""
    return f"{100 * share:.0f} %"


def name_columns(axis: Axes, names: Sequence[str], inches: float) -> None:
    """Puts a name under each column, slanted where it is wider than the column.

    Args:
        axis: Where the columns are at 0, 1, ...
        names: The names.
        inches: Width of a column.
    """
    fits = max(map(len, names), default=0) * 0.075 <= 0.9 * inches
    slanted = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    axis.set_xticks(range(len(names)), names, fontsize=8, **({} if fits else slanted))
