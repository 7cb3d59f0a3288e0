"""Static neural similarity against `Conv2D`, in training and in inference.

One rule: every network is the same but for its convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator

import keras
import tensorflow as tf

import nsl_keras
from benchmarks import measure

BATCH = 32
CLASSES = 10
SIMILARITIES = {"DNS": "diagonal", "UNS": "unconstrained"}


def comparisons(xla: bool) -> Iterator[measure.Comparison]:
    """Yields the comparisons of this group, one at a time."""
    images = tf.random.normal((BATCH, 32, 32, 3))
    labels = tf.random.uniform((BATCH,), maxval=CLASSES, dtype=tf.int32)
    networks = {"Conv2D": network(None)} | {
        f"static {name}": network(similarity) for name, similarity in SIMILARITIES.items()
    }
    yield measure.Comparison(
        "convnet4, training step",
        {
            name: measure.training_step(model, images, labels, xla)
            for name, model in networks.items()
        },
        calls_per_round=2,
    )
    networks |= {
        f"folded {name}": folded(networks[f"static {name}"]) for name in SIMILARITIES
    }
    yield measure.Comparison(
        "convnet4, inference",
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


def network(similarity: str | None) -> keras.Model:
    """The 4-layer ConvNet with a dense classifier."""
    backbone = nsl_keras.backbones.convnet4(similarity=similarity)
    logits = keras.layers.Dense(CLASSES)(backbone.output)
    return keras.Model(backbone.input, logits)


def folded(model: keras.Model) -> keras.Model:
    """The model with each neural-similarity convolution folded into a `Conv2D`."""

    def fold(layer: keras.layers.Layer) -> keras.layers.Layer:
        if isinstance(layer, nsl_keras.layers.NeuralSimilarityConv2D):
            return layer.fold()
        return type(layer).from_config(layer.get_config())

    plain = keras.models.clone_model(model, clone_function=fold)
    for old, new in zip(model.layers, plain.layers, strict=True):
        if type(old) is type(new):
            new.set_weights(old.get_weights())
    return plain
