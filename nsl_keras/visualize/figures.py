"""What the pictures have in common: figures, colours, names, images, batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Tensor = Any

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


def names_of(classes: int, class_names: Sequence[str] | None) -> list[str]:
    """The classes' names; their numbers where none are given."""
    if class_names is None:
        return [str(number) for number in range(classes)]
    if len(class_names) != classes:
        raise ValueError(
            f"`class_names` must hold {classes} names, one a class. "
            f"Received: {len(class_names)} names"
        )
    return [str(name) for name in class_names]


def draw_image(axis: Axes, image: np.ndarray, largest: float) -> None:
    """Draws one image of a stack whose largest value is given: in [0, 1] or [0, 255]."""
    scale = 255.0 if largest > 1.5 else 1.0
    axis.imshow(np.squeeze(image) / scale, cmap="gray_r", vmin=0, vmax=1)
    axis.set_xticks([])
    axis.set_yticks([])


def is_image(example: np.ndarray) -> bool:
    """Whether an example has the shape of an image, `(height, width, channels)`."""
    return example.ndim == 3 and example.shape[-1] in (1, 3, 4)


def class_numbers(labels: Any, classes: int, name: str = "y") -> np.ndarray:
    """Returns class numbers, of shape `(n,)`, for any labels that `fit` takes."""
    labels = np.asarray(labels)
    validation.class_labels(labels, classes, name)
    if labels.ndim == 2 and labels.shape[1] == classes:
        return labels.argmax(axis=1)
    return labels.reshape(-1).astype("int64")


def require_classifier(model: MetaNeighborhoodModel) -> None:
    """Raises unless a model has classes."""
    if model.task != "classification":
        raise ValueError(
            f"`model` must be a classifier. Received: a model with task={model.task!r}"
        )


def in_batches(function: Callable[[Tensor], Tensor], x: Any) -> np.ndarray:
    """What a function of a batch returns for all examples, as an array."""
    x = np.asarray(x)
    return np.concatenate(
        [
            ops.convert_to_numpy(function(ops.convert_to_tensor(x[start : start + 128])))
            for start in range(0, len(x), 128)
        ]
    )


def features_of(model: MetaNeighborhoodModel, x: Any) -> np.ndarray:
    """Features of all examples, of shape `(n, features)`."""
    return in_batches(lambda batch: model.features(batch, training=False), x)


def attention_of(model: MetaNeighborhoodModel, x: Any) -> np.ndarray:
    """Attention of all examples over the entries, of shape `(n, num_neighbors)`."""
    return in_batches(
        lambda batch: model.neighborhood.dictionary.attention(
            model.features(batch, training=False)
        ),
        x,
    )
