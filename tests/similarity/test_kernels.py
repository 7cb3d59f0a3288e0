"""The kernel of layers that derive from Keras's: what they refuse."""

import keras
import pytest

from nsl_keras import layers

#: A layer of each kind, and the Keras layer that it stands on.
KINDS = {
    "conv": (layers.NeuralSimilarityConv2D, keras.layers.Conv2D, {"kernel_size": 3}),
    "dense": (layers.NeuralSimilarityDense, keras.layers.Dense, {}),
    "sphere": (layers.SphereConv2D, keras.layers.Conv2D, {"kernel_size": 3}),
    "sphere_dense": (layers.SphereDense, keras.layers.Dense, {}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind, **options):
    layer, plain, arguments = KINDS[kind]
    width = {"units" if plain is keras.layers.Dense else "filters": 4}
    return layer(**width, **arguments, **options)


def built(kind, **options):
    layer = make(kind, **options)
    layer.build((None, 5, 5, 3))
    return layer


@each_kind
def test_lora_and_dora_are_refused(kind):
    message = r"\w+ takes no LoRA, DoRA or quantized dtype policy"
    with pytest.raises(ValueError, match=message):
        built(kind, lora_rank=2)
    for method in ("enable_lora", "enable_dora"):
        with pytest.raises(ValueError, match=message):
            getattr(built(kind), method)(2)


@each_kind
def test_quantization_is_refused(kind):
    layer = built(kind)
    with pytest.raises(NotImplementedError, match="`quantize`"):
        layer.quantize("int8")
    with pytest.raises(ValueError, match=r"takes no .*dtype=.*int8_from_float32"):
        built(kind, dtype="int8_from_float32")


def test_channels_must_be_known():
    with pytest.raises(ValueError, match="channel axis of the input must be known"):
        make("conv", data_format="channels_first").build((None, None, 5, 5))
