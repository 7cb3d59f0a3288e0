"""What pictures of trained models show."""

import keras
import numpy as np
from keras import ops

import nsl_keras
from examples.common import data, pictures


def test_induction_accuracy_is_of_fine_classes(one_thread):
    rng = np.random.default_rng(0)
    directions = np.eye(4, dtype="float32")

    def split(count):
        labels = np.arange(count) % 4
        noise = 0.05 * rng.normal(size=(count, 4))
        return data.Split((directions[labels] + noise).astype("float32"), labels)

    images = data.ImageData(split(40), split(0), split(12), list("abcd"))
    seeing = keras.Sequential([keras.Input((4,)), keras.layers.Identity()])
    blind = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(ops.zeros_like)])
    assert pictures.induction_accuracy(seeing, images) == 1
    assert pictures.induction_accuracy(blind, images) <= 0.5
    model = nsl_keras.MetaNeighborhoodModel(None, nsl_keras.layers.CosineDense(2), 4)
    model.build((None, 4))
    model.dictionary.assign(directions, np.eye(2)[[0, 0, 1, 1]])
    assert pictures.induction_accuracy(model, images) == 1


def test_the_example_taken_apart_is_one_put_right():
    """Example 2 has the largest change, example 1 alone is wrong before, right after."""

    class Model:
        def __call__(self, images, adapt, training):
            before = [[3.0, 0.0], [3.0, 1.0], [0.0, 3.0]]
            after = [[3.0, 0.0], [1.0, 3.0], [0.0, 9.0]]
            return np.array(after if adapt else before, "float32")

    split = data.Split(np.zeros((3, 8, 8, 1), "float32"), np.array([0, 1, 1]))
    assert pictures.most_changed(Model(), split) == 1
