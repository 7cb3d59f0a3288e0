"""Layers that change their class in place."""

import keras
import numpy as np
import pytest
from helpers import as_numpy, normal

import nsl_keras

IMAGES = normal(2, 8, 8, 3)


@pytest.mark.parametrize("predictor", [None, "sphere"])
def test_what_turns_computes_in_half_precision_as_what_is_made(predictor):
    options = {"similarity": "unconstrained", "predictor": predictor}
    plain = keras.layers.Conv2D(4, 3, dtype="mixed_bfloat16", name="layer")
    model = keras.Sequential([keras.Input((8, 8, 3)), plain])
    similar = nsl_keras.convert.add_similarity(model, **options)
    made = nsl_keras.layers.NeuralSimilarityConv2D(
        4, 3, dtype="mixed_bfloat16", name="layer", **options
    )
    made.build((None, 8, 8, 3))
    weights = similar.layers[0].get_weights()
    rng = np.random.default_rng(0)
    weights = [each + 0.1 * rng.normal(size=each.shape) for each in weights]
    for layer in (similar.layers[0], made):
        layer.set_weights(weights)
    np.testing.assert_array_equal(as_numpy(similar(IMAGES)), as_numpy(made(IMAGES)))
