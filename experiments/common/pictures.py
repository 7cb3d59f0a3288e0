"""A picture of one prediction of a trained image classifier."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from experiments.common.data import ImageData, Split
from nsl_keras import MetaNeighborhoodModel, visualize
from nsl_keras.training.data import predict

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


def attention_of(model: keras.Model, x: Any) -> np.ndarray:
    """The attention of all examples, of shape `(n, num_neighbors)`."""
    return predict(
        lambda batch: model.dictionary.attention(model.features(batch, training=False)),
        model,
        x,
    )


def most_changed(model: MetaNeighborhoodModel, test: Split) -> int:
    """The example that adaptation puts right with the largest change of its true logit.

    If it puts none right, that with the largest change.
    """
    before = predict(lambda batch: model(batch, adapt=False), model, test.images)
    after = model.predict(test.images, verbose=0)
    true = np.arange(len(test.labels)), test.labels
    wrong = before.argmax(axis=1) != test.labels
    right = after.argmax(axis=1) == test.labels
    return int(np.argmax((after - before)[true] + 1e3 * (wrong & right)))
