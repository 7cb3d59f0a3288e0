"""Helpers for tests of pictures."""

import keras
import numpy as np

import nsl_keras


def check_saved(figure, folder):
    path = folder / "figure.png"
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def small_model(head, task="classification", metric="cosine", inputs=6, entries=12):
    """A built model whose adaptation, entries and values are all far from zero."""
    model = nsl_keras.MetaNeighborhoodModel(
        keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(5)]),
        head,
        nsl_keras.layers.NeighborDictionary(entries, metric=metric),
        inner_learning_rate=0.5,
        task=task,
    )
    model.build((None, inputs))
    rng = np.random.default_rng(0)
    dictionary = model.dictionary
    dictionary.keys.assign(rng.normal(size=dictionary.keys.shape))
    values = dictionary.value_logits
    values = dictionary.value_targets if values is None else values
    values.assign(rng.normal(size=values.shape))
    return model


def offsets(collection):
    """Places of a scatter's points, of shape `(n, 2)`."""
    return np.asarray(collection.get_offsets())
