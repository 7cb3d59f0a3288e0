"""Helpers for tests of pictures."""

import keras
import numpy as np

import nsl_keras


def small_model(head, task="classification", shape=(6,)):
    """A built model whose adaptation, entries and values are all far from zero."""
    backbone = keras.Sequential(
        [keras.Input(shape), keras.layers.Flatten(), keras.layers.Dense(5)]
    )
    model = nsl_keras.MetaNeighborhoodModel(
        backbone,
        head,
        dictionary=12,
        inner_learning_rate=0.5,
        task=task,
    )
    model.build((None, *shape))
    rng = np.random.default_rng(0)
    dictionary = model.dictionary
    dictionary.keys.assign(rng.normal(size=dictionary.keys.shape))
    values = dictionary.raw_values
    values.assign(rng.normal(size=values.shape))
    return model


def drawn(axis):
    """The numbers that an axis draws as an image."""
    return np.asarray(axis.images[0].get_array())


def written(axis):
    """The numbers that are written on an axis."""
    return [float(text.get_text()) for text in axis.texts]


def attention_of(model, x):
    """Attention of all examples, of shape `(n, num_neighbors)`."""
    attention = model.dictionary.attention(model.features(keras.ops.convert_to_tensor(x)))
    return keras.ops.convert_to_numpy(attention)


def offsets(collection):
    """Places of a scatter's points, of shape `(n, 2)`."""
    return np.asarray(collection.get_offsets())
