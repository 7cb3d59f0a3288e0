"""Layers that become their kin in place, and the private names of Keras that it takes."""

import keras
import numpy as np
import pytest
from helpers import as_numpy, normal
from keras import ops

import nsl_keras
from nsl_keras.backend import built_layers
from nsl_keras.turning import turned

IMAGES = normal(2, 8, 8, 3)


class Scaled(keras.layers.Conv2D):
    def build_scale(self):
        self.scale = keras.layers.Rescaling(2.0)
        self.factor = self.add_weight((), "ones", name="factor")

    def call(self, inputs):
        return self.factor * self.scale(super().call(inputs))


@pytest.mark.jax
def test_a_layer_in_a_model_turns_and_turns_back():
    layer = keras.layers.Conv2D(4, 3, name="layer")
    model = keras.Sequential([keras.Input((8, 8, 3)), layer], name="model")
    before, paths = as_numpy(model(IMAGES)), [each.path for each in model.variables]
    with turned(layer, Scaled) as input_shape:
        layer.build_scale()
    assert input_shape == (None, 8, 8, 3)
    np.testing.assert_allclose(model(IMAGES), 2 * before, rtol=1e-5, atol=1e-6)
    assert [each.path for each in model.variables] == [*paths, "model/layer/factor"]
    with pytest.raises(ValueError, match="cannot add new elements of state"):
        layer.another = keras.layers.Dense(1)
    built_layers.remove_attribute(layer, "scale")
    built_layers.remove_attribute(layer, "factor")
    layer.__class__ = keras.layers.Conv2D
    np.testing.assert_array_equal(model(IMAGES), before)
    assert [each.path for each in model.trainable_variables] == paths
    model.compile("sgd", "mse")
    model.fit(IMAGES, np.zeros(before.shape), verbose=0)


@pytest.mark.jax
def test_autocast_is_switched_off_and_on():
    class Reads(keras.layers.Dense):
        def call(self, inputs):
            self.read = ops.convert_to_tensor(self.kernel).dtype
            return super().call(inputs)

    layer = Reads(2, dtype="mixed_bfloat16")
    layer.build((None, 3))
    for autocast, dtype in ((True, "bfloat16"), (False, "float32"), (True, "bfloat16")):
        built_layers.set_autocast(layer.kernel, autocast)
        layer(np.ones((1, 3), "float32"))
        assert keras.backend.standardize_dtype(layer.read) == dtype


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
