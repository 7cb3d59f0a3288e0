"""Products of similarities: from the identity or a given matrix, in files and folds."""

import functools

import keras
import numpy as np

from experiments.neural_similarity.product import Product
from nsl_keras.layers import NeuralSimilarityConv2D


def test_product(tmp_path):
    images = np.random.default_rng(0).normal(size=(2, 5, 5, 3)).astype("float32")
    start = keras.initializers.RandomNormal(seed=1)
    layer = NeuralSimilarityConv2D(4, 2, similarity=Product(3, initializer=start))
    model = keras.Sequential([keras.Input((5, 5, 3)), layer])
    parameters = layer.bilinear_form.similarity_parameters
    first, *others = np.array(parameters)
    np.testing.assert_array_equal(others, [np.eye(4)] * 2)
    np.testing.assert_allclose(layer.similarity_matrix, first, rtol=1e-6)
    parameters.assign(np.random.default_rng(1).normal(size=(3, 4, 4)))
    expected = functools.reduce(np.matmul, np.array(parameters))
    np.testing.assert_allclose(layer.similarity_matrix, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.fold()(images), layer(images), rtol=1e-4, atol=1e-4)
    model.compile("sgd", "mse")
    model.fit(images, np.ones((2, 4, 4, 4)), verbose=0)
    assert np.abs(np.array(parameters) - first).max() > 0
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(images), model(images))
