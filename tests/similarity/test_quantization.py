"""LoRA and quantization of layers with a similarity: what works, and what they refuse."""

import functools

import keras
import numpy as np
import pytest
from helpers import normal, reloaded, stacked

from nsl_keras import layers

RESPONSE = {"response": "learnable_sigmoid"}
KINDS = {
    "conv": functools.partial(layers.NeuralSimilarityConv2D, 4, 3),
    "dense": functools.partial(layers.NeuralSimilarityDense, 4),
    "sphere": functools.partial(layers.SphereConv2D, 4, 3, **RESPONSE),
    "sphere_dense": functools.partial(layers.SphereDense, 4, use_bias=True, **RESPONSE),
}


@pytest.mark.parametrize("kind", KINDS)
def test_lora_and_quantization(kind, tmp_path):
    def built(**options):
        layer = KINDS[kind](**options)
        layer.build((None, 5, 5, 3))
        return layer

    layer, other = built(), built(lora_rank=2)
    next(each for each in other.weights if each.name == "kernel").assign(layer.kernel)
    images = normal(2, 5, 5, 3)
    np.testing.assert_allclose(other(images), layer(images), atol=1e-6)
    other.lora_kernel_b.assign(np.ones(other.lora_kernel_b.shape))
    layer.kernel.assign(other.kernel)
    np.testing.assert_allclose(other(images), layer(images), atol=1e-6)
    model, merged = (stacked((5, 5, 3), each) for each in (other, built()))
    model.save_weights(tmp_path / "1.weights.h5")
    merged.load_weights(tmp_path / "1.weights.h5")
    for loaded in (merged, reloaded(model, tmp_path)):
        np.testing.assert_allclose(loaded(images), layer(images), atol=1e-6)
    with pytest.raises(NotImplementedError, match="`quantize`"):
        built().quantize("int8")
    for mode in ["float8"] if kind == "dense" else ["float8", "int8"]:
        with pytest.raises(ValueError, match=rf"`dtype` must be .*{mode}"):
            built(dtype=f"{mode}_from_float32")


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize`")
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (layers.NeuralSimilarityDense(4, predictor="sphere"), (6,)),
        (layers.NeuralSimilarityGRU(4, predictor="sphere"), (5, 6)),
        (layers.GlobalNeuralSimilarity2D("softmax_attention", sphere=False), (4, 4, 6)),
    ],
    ids=["dense", "recurrent", "attention"],
)
def test_quantized_models_load(layer, shape, tmp_path):
    model = keras.Sequential([keras.Input(shape), layer, keras.layers.Dense(3)])
    model.quantize("int8")
    again = reloaded(model, tmp_path)
    inputs = normal(2, *shape)
    np.testing.assert_allclose(again(inputs), model(inputs), rtol=1e-5)
