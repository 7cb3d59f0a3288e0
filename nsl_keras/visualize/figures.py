"""What the pictures have in common: empty figures, colours, images."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

#: `matplotlib.figure.Figure` and `matplotlib.axes.Axes`. Matplotlib is optional, and
#: imported when the first picture is drawn.
Figure: TypeAlias = Any
Axes: TypeAlias = Any

#: Two colours that no kind of colour blindness confuses, and one for what is between.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#8C8C8C"

#: Ten colours chosen to stay apart for colour-blind eyes (M. A. Petroff, 2021).
_TEN_COLORS = [
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
]


def new_figure(**options: Any) -> Figure:
    """Returns an empty figure that no window shows."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            "`nsl_keras.visualize` needs matplotlib. Install it with "
            '`pip install "nsl_keras[visualize]"`.'
        ) from error
    return Figure(layout="constrained", **options)


def colors_of(classes: int) -> list[Any]:
    """A colour for each class: up to ten that differ, else steps of a colour map."""
    if classes <= len(_TEN_COLORS):
        return _TEN_COLORS[:classes]
    import matplotlib

    return list(matplotlib.colormaps["viridis"](np.linspace(0, 1, classes)))


def display_range(*stacks: np.ndarray) -> tuple[float, float]:
    """The values drawn as black and white: 0 to 1, 0 to 255, or all that images hold.

    The last is for images that were standardized: a model gets those it was trained on.
    """
    smallest = min(float(stack.min()) for stack in stacks)
    largest = max(float(stack.max()) for stack in stacks)
    if smallest < 0 or largest > 255:
        return smallest, largest if largest > smallest else smallest + 1.0
    return 0.0, 255.0 if largest > 1.5 else 1.0


def draw_image(axis: Axes, image: np.ndarray, values: tuple[float, float]) -> None:
    """Draws one image, of a stack with a `display_range`."""
    low, high = values
    shown = (np.squeeze(image) - low) / (high - low)
    axis.imshow(shown, cmap="gray_r", vmin=0, vmax=1)
    axis.set_xticks([])
    axis.set_yticks([])


def is_image(example: np.ndarray) -> bool:
    """Whether an example has the shape of an image, `(height, width, channels)`."""
    return example.ndim == 3 and example.shape[-1] in (1, 3, 4)
