"""What pictures of trained image classifiers share, and one of a single prediction."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from experiments.common.data import ImageData, Split
from nsl_keras import MetaNeighborhoodModel, visualize
from nsl_keras.visualize.figures import display_range, draw_image, new_figure

#: Examples that a map or a picture shows; more hide each other.
SHOWN = 2000


def of_adaptation(model: MetaNeighborhoodModel, data: ImageData, test: Split) -> object:
    """The prediction of some test images that adaptation changed most, taken apart."""
    image, shown = test.images[most_changed(model, test)], data.train.take(SHOWN).images
    # A dictionary of Figure 8 may be smaller than the picture.
    k = min(6, model.dictionary.num_neighbors)
    return visualize.plot_adaptation(
        model, image, k=k, images=shown, class_names=data.class_names
    )


def in_batches(function: Callable[[Any], Any], x: np.ndarray) -> np.ndarray:
    parts = [function(x[first : first + 256]) for first in range(0, len(x), 256)]
    return np.concatenate([keras.ops.convert_to_numpy(part) for part in parts])


def attention_of(model: MetaNeighborhoodModel, x: np.ndarray) -> np.ndarray:
    """The attention of all examples, of shape `(n, num_neighbors)`."""
    return in_batches(
        lambda batch: model.dictionary.attention(model.features(batch, training=False)), x
    )


def most_changed(model: MetaNeighborhoodModel, test: Split) -> int:
    """The example that adaptation puts right with the largest change of its true logit.

    If it puts none right, that with the largest change.
    """
    after = model.predict(test.images, verbose=0)
    before = model.unadapted.predict(test.images, verbose=0)
    true = np.arange(len(test.labels)), test.labels
    wrong = before.argmax(axis=1) != test.labels
    right = after.argmax(axis=1) == test.labels
    return int(np.argmax((after - before)[true] + 1e3 * (wrong & right)))


def grid_of_images(
    images: np.ndarray, found: np.ndarray, captions: np.ndarray, first_width: float = 1.0
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Rows of the images with the numbers `found`, an empty panel before each row.

    Returns the figure, the empty panels, and the panels of the images.
    """
    rows, columns = found.shape
    figure = new_figure(0.95 * (columns + first_width) + 0.5, 1.15 * rows + 0.7)
    widths = [first_width] + [1.0] * columns
    panels = figure.subplots(rows, columns + 1, squeeze=False, width_ratios=widths)
    for axis, index, caption in zip(
        panels[:, 1:].flat, found.flat, captions.flat, strict=True
    ):
        draw_image(axis, images[index], display_range(images), caption)
    return figure, panels[:, 0], panels[:, 1:]
