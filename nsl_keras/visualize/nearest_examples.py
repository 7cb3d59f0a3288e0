"""Dictionary entries, each with the real examples nearest to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops

from nsl_keras import validation
from nsl_keras.neighborhoods.explain import attention_of, names_of, require_classifier
from nsl_keras.neighborhoods.model import MetaNeighborhoodModel
from nsl_keras.visualize.figures import display_range, draw_image, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        images: Array of images, `(n, height, width, channels)`, as the model gets them.
            In [0, 1] or [0, 255] they are drawn as they are, others (standardised ones)
            from their lowest to their highest value.
        entries: Entry numbers to draw; `None` takes, for each class in turn, the entry
            that the images look at most.
        nearest: int, the number of images drawn for each entry.
        class_names: Names of the classes; `None` numbers them.

    Returns:
        A matplotlib figure, one row an entry.

    Raises:
        ValueError: If `nearest` exceeds the number of images, an entry is not in the
            dictionary, or the model is no classifier.

    Example:

    >>> import numpy as np
    >>> import nsl_keras
    >>> model = nsl_keras.MetaNeighborhoodModel(
    ...     nsl_keras.backbones.convnet4((8, 8, 1)),
    ...     nsl_keras.layers.CosineDense(3), dictionary=12)
    >>> images = np.random.default_rng(0).random((20, 8, 8, 1)).astype("float32")
    >>> model.build(images.shape)
    >>> len(nsl_keras.visualize.learned_neighbors(model, images, [0, 5]).axes)
    14

    Reference:
        Meta-Neighborhoods (Shan et al., NeurIPS 2020), Appendix A.8, Figures 9 and 10.
    """
    require_classifier(model)
    images = np.asarray(images)
    nearest = validation.positive_integer(nearest, "nearest")
    if nearest > len(images):
        raise ValueError(
            f"`nearest` must be at most the number of images, {len(images)}. "
            f"Received: nearest={nearest}"
        )
    attention = attention_of(model, images)
    values = ops.convert_to_numpy(model.dictionary.values)
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
    names = names_of(classes, class_names)
    figure = new_figure(figsize=(2.6 + 0.9 * nearest, 0.95 * len(entries)))
    rows = figure.subplots(
        len(entries),
        nearest + 1,
        squeeze=False,
        gridspec_kw={"width_ratios": [2.4] + [1] * nearest},
    )
    shown = display_range(images)
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
            draw_image(axis, images[index], shown)
            axis.set_axis_off()
    return figure
