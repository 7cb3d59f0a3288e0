"""How many images a model gets right: in training mode, and in inference mode."""

from __future__ import annotations

import keras
import numpy as np

import nsl_keras
from experiments.common.data import Split


def accuracy(model: keras.Model, split: Split) -> float:
    """Share of images that a model in inference mode classifies right."""
    logits = model.predict(split.images, batch_size=250, verbose=0)
    return float(np.mean(logits.argmax(axis=-1) == split.labels))


def accuracies_by_mode(
    model: keras.Model, split: Split, batch_size: int
) -> dict[str, float]:
    """Accuracies on the same images, in training mode and in inference mode.

    No state changes. In training mode batch norms normalize by batches as large as those
    of the training; a dictionary is complete in both modes.
    """
    logits = []
    for first in range(0, len(split.images), batch_size):
        batch = split.images[first : first + batch_size]
        with keras.StatelessScope():
            if isinstance(model, nsl_keras.MetaNeighborhoodModel):
                features = model.features(batch, training=True)
                outputs = model.neighborhood(features, training=False)
            else:
                outputs = model(batch, training=True)
        logits.append(keras.ops.convert_to_numpy(outputs))
    right = np.concatenate(logits).argmax(axis=-1) == split.labels
    return {"training": float(np.mean(right)), "inference": accuracy(model, split)}
