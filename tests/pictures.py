"""Helpers for tests of pictures."""

import keras
import numpy as np
from helpers import as_numpy, stacked

import nsl_keras


def small_model(head, task="classification", shape=(6,)):
    """A built model whose adaptation, entries and values are all far from zero."""
    backbone = stacked(shape, keras.layers.Flatten(), keras.layers.Dense(5))
    options = {"inner_learning_rate": 0.5, "task": task}
    model = nsl_keras.MetaNeighborhoodModel(backbone, head, 12, **options)
    model.build((None, *shape))
    rng = np.random.default_rng(0)
    for variable in (model.dictionary.keys, model.dictionary.raw_values):
        variable.assign(rng.normal(size=variable.shape))
    return model


def drawn(axis):
    """The numbers that an axis draws as an image."""
    return np.asarray(axis.images[0].get_array())


def written(axis):
    """The numbers that are written on an axis."""
    return [float(text.get_text()) for text in axis.texts]


def attention_of(model, x):
    """Attention of all examples, of shape `(n, num_neighbors)`."""
    return as_numpy(model.dictionary.attention(model.features(x)))


def offsets(collection):
    """Places of a scatter's points, of shape `(n, 2)`."""
    return np.asarray(collection.get_offsets())
