"""The paper's pictures of trained image classifiers, and of their neighbors."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from experiments.common.data import ImageData
from experiments.common.pictures import SHOWN, of_adaptation
from experiments.image_classification.entries import plot_entries
from experiments.image_classification.features import (
    plot_feature_map,
    plot_prototype_cosines,
)
from experiments.image_classification.subcategories import plot_subcategories
from nsl_keras import MetaNeighborhoodModel

#: Of these the nearest training images are sought for pictures of sub-categories.
QUERIES = 1000


def of_neighbors(models: Mapping[str, keras.Model], data: ImageData) -> dict[str, object]:
    """Figures 4, 5 and 9 of the paper, and one prediction of each adapting model."""
    figures: dict[str, object] = {}
    train, test, names = data.train.take(SHOWN), data.test.take(SHOWN), data.class_names
    for name, model in models.items():
        if not isinstance(model, MetaNeighborhoodModel):
            continue
        figures[f"{name}_feature_map"] = plot_feature_map(model, train, names)
        figures[f"{name}_prototype_cosines"] = plot_prototype_cosines(model, test)
        figures[f"{name}_entries"] = plot_entries(model, test.images, names)
        figures[f"{name}_adaptation"] = of_adaptation(model, data, test)
    return figures


def of_subcategories(
    models: Mapping[str, keras.Model], data: ImageData
) -> dict[str, object]:
    """Figure 6: test images and the training images nearest to them, by fine labels."""
    train, queries = data.train.take(5 * SHOWN), data.test.take(QUERIES)
    return {
        f"{name}_subcategories": plot_subcategories(model, train, queries, data.class_names)
        for name, model in models.items()
    }
