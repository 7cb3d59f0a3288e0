"""Folded kernels of one tap as a shift and a 1x1 convolution."""

import keras
import numpy as np
import pytest
from keras import ops
from layer_harness import stack

from experiments.neural_similarity.shifts import with_shifts
from nsl_keras.convert import fold
from nsl_keras.layers import NeuralSimilarityConv2D, NeuralSimilarityDepthwiseConv2D
from nsl_keras.similarities import Sparse

ONE = {"similarity": Sparse(1), "padding": "same", "bias_initializer": "ones"}


@pytest.mark.parametrize("tap", [(0, 0), (1, 0), (2, 3)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: NeuralSimilarityConv2D(5, (3, 4), activation="relu", **ONE),
        lambda: NeuralSimilarityConv2D(5, (3, 4), dilation_rate=3, **ONE),
        lambda: NeuralSimilarityDepthwiseConv2D((3, 4), depth_multiplier=2, **ONE),
    ],
    ids=["plain", "dilated", "depthwise"],
)
def test_a_shift_computes_the_same(make, tap):
    layer = make()
    model = stack(layer, shape=(6, 5, 3))
    matrix = np.zeros((12, 12), "float32")
    matrix[4, np.ravel_multi_index(tap, (3, 4))] = 1.5
    layer.bilinear_form.similarity_parameters.assign(matrix)
    shifted = with_shifts(fold(model))
    assert shifted.layers[-1].layers[-1].kernel_size == (1, 1)
    images = np.random.default_rng(0).normal(size=(2, 6, 5, 3)).astype("float32")
    expected, found = (ops.convert_to_numpy(each(images)) for each in (model, shifted))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_other_kernels_stay():
    layers = keras.layers.Conv2D(4, 3, padding="same"), keras.layers.Conv2D(4, 1)
    model = stack(*layers, shape=(6, 5, 3))
    assert with_shifts(model).layers[-2:] == model.layers[-2:]
