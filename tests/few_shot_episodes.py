"""Small episodes and backbones for the tests of learners."""

import keras
import numpy as np
from helpers import stacked

import nsl_keras

WAYS, SHOTS, QUERIES, SIZE = 3, 2, 4, 6


def episodes(batch=2, ways=WAYS, shots=SHOTS, queries=QUERIES, shape=(SIZE,), seed=0):
    """A batch of random episodes, supports in no order: inputs, and query labels."""
    rng = np.random.default_rng(seed)
    labels = np.stack(
        [rng.permutation(np.repeat(np.arange(ways), shots)) for _ in range(batch)]
    )
    support = rng.normal(size=(batch, ways * shots, *shape)).astype("float32")
    queries = rng.normal(size=(batch, queries, *shape)).astype("float32")
    return (support, labels, queries), rng.integers(0, ways, size=queries.shape[:2])


def identity(*shape):
    """A backbone that returns its inputs, so that features are at hand."""
    inputs = keras.Input(shape or (SIZE,))
    return keras.Model(inputs, keras.layers.Identity()(inputs))


def convolutional(flat=True):
    """A backbone for 6x6 images, with batch norms and pooling."""
    layers = [
        keras.layers.Conv2D(4, 3, padding="same"),
        nsl_keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Conv2D(3, 3),
    ]
    if flat:
        layers.append(keras.layers.MaxPooling2D(2))
    return stacked((6, 6, 1), *layers)


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def scores(queries, references, metric):
    """Of each query with each reference: cosines, or minus the squared distances."""
    if metric == "cosine":
        return np.einsum("bqd,brd->bqr", unit(queries), unit(references))
    return -((queries[:, :, None] - references[:, None]) ** 2).sum(-1)
