"""Static neural similarity against `Conv2D`, in training and in inference.

One rule: every network is the same but for its convolutions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import keras
import tensorflow as tf

import nsl_keras
from experiments.speed import measure

BATCH = 32
CLASSES = 10
SIMILARITIES = {"DNS": "diagonal", "UNS": "unconstrained"}


def comparisons(xla: bool) -> Iterator[measure.Comparison]:
    """Yields the comparisons of this group, one at a time."""
    images = tf.random.normal((BATCH, 32, 32, 3))
    labels = tf.random.uniform((BATCH,), maxval=CLASSES, dtype=tf.int32)
    networks = {"Conv2D": nsl_keras.backbones.cnn9()} | {
        f"static {name}": nsl_keras.backbones.cnn9(
            convolution=functools.partial(
                nsl_keras.layers.NeuralSimilarityConv2D, similarity=similarity
            )
        )
        for name, similarity in SIMILARITIES.items()
    }
    yield measure.Comparison(
        "CNN-9, training step",
        {
            name: measure.training_step(model, images, labels, xla)
            for name, model in networks.items()
        },
    )
    networks |= {
        f"folded {name}": nsl_keras.convert.fold(networks[f"static {name}"])
        for name in SIMILARITIES
    }
    yield measure.Comparison(
        "CNN-9, inference",
        {name: measure.forward(model, images, xla) for name, model in networks.items()},
        calls_per_round=5,
    )
    features = tf.random.normal((BATCH, 32, 32, 32))
    layers = {"Conv2D": keras.layers.Conv2D(32, 3, padding="same")} | {
        f"static {name}": nsl_keras.layers.NeuralSimilarityConv2D(
            32, 3, padding="same", similarity=similarity
        )
        for name, similarity in SIMILARITIES.items()
    }
    for layer in layers.values():
        layer.build(features.shape)
    layers |= {f"folded {name}": layers[f"static {name}"].fold() for name in SIMILARITIES}
    yield measure.Comparison(
        "one layer 32x32, 32->32, inference",
        {name: measure.forward(layer, features, xla) for name, layer in layers.items()},
        calls_per_round=5,
    )
