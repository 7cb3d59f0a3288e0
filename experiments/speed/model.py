"""Whole Meta-Neighborhoods models against the same backbone with a plain head.

One rule: both models take the same step, written once, so that only the head differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

import nsl_keras
from experiments.speed import measure

#: Backbone, entries, classes and batch size.
CASES = (
    ("convnet4", 5000, 10, 128),
    ("resnet_v2(29)", 5000, 10, 128),
    ("resnet_v2(29)", 10000, 100, 16),
)
BACKBONES = {
    "convnet4": nsl_keras.backbones.convnet4,
    "resnet_v2(29)": lambda: nsl_keras.backbones.resnet_v2(29),
}


def comparisons(xla: bool) -> Iterator[measure.Comparison]:
    """Yields the comparisons of this group, one at a time."""
    for title, neighbors, classes, batch in CASES:
        images = tf.random.normal((batch, 32, 32, 3))
        labels = tf.random.uniform((batch,), maxval=classes, dtype=tf.int32)
        models = plain_and_adapting(BACKBONES[title], neighbors, classes)
        case = f"{title}, S={neighbors}, C={classes}, B={batch}"
        yield measure.Comparison(
            f"{case}, inference",
            {name: measure.forward(model, images, xla) for name, model in models.items()},
        )
        yield measure.Comparison(
            f"{case}, training step",
            {
                name: measure.training_step(model, images, labels, xla)
                for name, model in models.items()
            },
        )


def plain_and_adapting(
    backbone: Callable[[], keras.Model], neighbors: int, classes: int
) -> dict[str, keras.Model]:
    """The model with a plain head and the one that adapts it, by name."""
    features = backbone()
    logits = nsl_keras.layers.CosineDense(classes)(features.output)
    adapting = nsl_keras.MetaNeighborhoodModel(
        backbone(),
        nsl_keras.layers.CosineDense(classes),
        nsl_keras.layers.NeighborDictionary(neighbors, dropout=0.5, seed=0),
    )
    adapting.build((None, *features.input_shape[1:]))
    return {
        "backbone + CosineDense": keras.Model(features.input, logits),
        "Meta-Neighborhoods": adapting,
    }
