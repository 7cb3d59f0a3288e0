"""How many images a model gets right: in training mode, and in inference mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import keras
import numpy as np

import nsl_keras
from experiments.common.data import Split
from nsl_keras import rewiring


def accuracy(model: keras.Model, split: Split) -> float:
    """Share of images that a model in inference mode classifies right."""
    logits = model.predict(split.images, batch_size=250, verbose=0)
    return float(np.mean(logits.argmax(axis=-1) == split.labels))


def accuracies_by_mode(
    model: keras.Model, split: Split, batch_size: int
) -> dict[str, float]:
    """Accuracies on the same images, in training mode and in inference mode.

    No state changes. In training mode batch norms normalize by batches as large as those
    of the training; a dictionary is complete in both modes. `"estimated"` is inference
    too, where the moving statistics are the means of those of the batches.
    """
    norms = batch_norms(model)
    logits, statistics = in_training_mode(model, norms, split.images, batch_size)
    inference = accuracy(model, split)
    with with_statistics(norms, statistics):
        estimated = accuracy(model, split)
    training = float(np.mean(logits.argmax(axis=-1) == split.labels))
    return {"training": training, "inference": inference, "estimated": estimated}


def batch_norms(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Those of a model that normalize by batches in training, at any depth."""
    return [
        layer
        for layer in rewiring.sublayers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
    ]


def in_training_mode(
    model: keras.Model,
    norms: list[keras.layers.BatchNormalization],
    images: np.ndarray,
    batch_size: int,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits, and the batches' mean statistics, as `moving_statistics` orders them."""
    moving = moving_statistics(norms)
    # From zero a training step leaves a share of its batch's statistics: all of them where
    # no example was seen.
    seen = [norm.seen_examples for norm in norms if hasattr(norm, "seen_examples")]
    start = [(each, keras.ops.zeros_like(each)) for each in (*moving, *seen)]
    shares = [
        1.0 if hasattr(norm, "seen_examples") else 1 - norm.momentum for norm in norms
    ] * 2
    logits, statistics = [], []
    for first in range(0, len(images), batch_size):
        batch = images[first : first + batch_size]
        with keras.StatelessScope(start) as scope:
            if isinstance(model, nsl_keras.MetaNeighborhoodModel):
                features = model.features(batch, training=True)
                outputs = model.neighborhood(features, training=False)
            else:
                outputs = model(batch, training=True)
        logits.append(keras.ops.convert_to_numpy(outputs))
        found = [keras.ops.convert_to_numpy(scope.get_current_value(v)) for v in moving]
        statistics.append([v / share for v, share in zip(found, shares, strict=True)])
    means = [np.mean(values, axis=0) for values in zip(*statistics, strict=True)]
    return np.concatenate(logits), means


def moving_statistics(norms: list[keras.layers.BatchNormalization]) -> list[keras.Variable]:
    """All moving means, then all moving variances."""
    means = [norm.moving_mean for norm in norms]
    return means + [norm.moving_variance for norm in norms]


@contextlib.contextmanager
def with_statistics(
    norms: list[keras.layers.BatchNormalization], statistics: list[np.ndarray]
) -> Iterator[None]:
    """Sets moving statistics for a while."""
    moving = moving_statistics(norms)
    before = [keras.ops.convert_to_numpy(each) for each in moving]
    _assign(moving, statistics)
    try:
        yield
    finally:
        _assign(moving, before)


def _assign(variables: list[keras.Variable], values: list[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
