"""What all layers on Keras's own share: arguments, the kernel's dtype, what is refused."""

import inspect
import pathlib

import keras
import numpy as np
import pytest
from keras import ops

from nsl_keras import layers

FILES = pathlib.Path(__file__).parents[1] / "files"
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
def test_signature_shows_all_arguments(kind):
    """Keras's in their order, LoRA and quantization apart, and then the layer's own."""
    layer, plain, _ = KINDS[kind]
    *parameters, options = inspect.signature(layer).parameters.values()
    assert options.kind is options.VAR_KEYWORD
    *theirs, _ = inspect.signature(plain).parameters
    theirs = [
        name
        for name in theirs
        if name not in ("lora_rank", "lora_alpha", "quantization_config")
    ]
    names = [each.name for each in parameters]
    assert names[: len(theirs)] == theirs
    assert names[-1] in ("kernel_trainable", "block_size", "response")
    defaults = {each.name: each.default for each in parameters}
    assert defaults["use_bias"] is not kind.startswith("sphere")
    assert layer.plain is plain


def test_signature_of_a_class_with_arguments_of_its_own():
    class Narrow(layers.NeuralSimilarityConv2D):
        def __init__(self, filters, **kwargs):
            super().__init__(filters, 1, **kwargs)

    class Named(layers.NeuralSimilarityConv2D):
        def __init__(self, *args, label="", **kwargs):
            super().__init__(*args, **kwargs)

    assert [*inspect.signature(Narrow).parameters] == ["filters", "kwargs"]
    names = [*inspect.signature(Named).parameters]
    assert names[:2] == ["filters", "kernel_size"]
    assert {"similarity", "label"} <= {*names}


@each_kind
def test_kernel_stays_out_of_autocast(kind):
    layer = make(kind, dtype="mixed_bfloat16")
    seen = []
    layer.activation = lambda outputs: (
        seen.append(ops.convert_to_tensor(layer.kernel).dtype),
        outputs,
    )[1]
    outputs = layer(ops.ones((2, 5, 5, 3)))
    assert keras.backend.standardize_dtype(outputs.dtype) == "bfloat16"
    assert [keras.backend.standardize_dtype(dtype) for dtype in seen] == ["float32"]


# What would go past the similarity without a word.


@each_kind
def test_lora_is_refused(kind):
    with pytest.raises(ValueError, match=r"`lora_rank` must be None.*lora_rank=2"):
        make(kind, lora_rank=2)
    with pytest.raises(ValueError, match=r"`enable_lora` is not available: \w+ cannot"):
        built(kind).enable_lora(2)


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
@each_kind
def test_quantization_is_refused(kind):
    layer = built(kind)
    with pytest.raises(NotImplementedError, match=r"`quantize` is not .*mode='int8'"):
        layer.quantize("int8")
    # Keras passes over layers that cannot be quantized, and quantizes the others.
    model = keras.Sequential([layer, keras.layers.Dense(2)])
    inputs = np.random.default_rng(0).normal(size=(2, 5, 5, 3)).astype("float32")
    expected = ops.convert_to_numpy(layer(inputs))
    model.build(inputs.shape)
    with pytest.warns(UserWarning, match="`quantize` is not available"):
        model.quantize("int8")
    np.testing.assert_array_equal(ops.convert_to_numpy(layer(inputs)), expected)


@each_kind
def test_quantized_policies_are_refused(kind):
    message = r"`dtype` must not be a quantized policy.*int8_from_float32"
    with pytest.raises(ValueError, match=message):
        make(kind, dtype="int8_from_float32")
    layer = make(kind)
    layer.dtype_policy = "int8_from_float32"
    with pytest.raises(ValueError, match=message):
        layer.build((None, 5, 5, 3))
    by_path = keras.dtype_policies.DTypePolicyMap()
    by_path["there"] = keras.dtype_policies.get("int8_from_float32")
    with pytest.raises(ValueError, match="`dtype` must not be a quantized policy"):
        built(kind, name="there", dtype=by_path)


@each_kind
def test_channels_must_be_known(kind):
    with pytest.raises(ValueError, match="last axis of the input must be known"):
        make(kind).build((None, 5, 5, None))
    if "kernel_size" in KINDS[kind][2]:
        with pytest.raises(ValueError, match="channel axis of the input must be known"):
            make(kind, data_format="channels_first").build((None, None, 5, 5))


# Files.


def test_a_file_of_version_0_1_loads():
    """All layers and predictors, written when they did not stand on Keras's own."""
    model = keras.saving.load_model(FILES / "similarity.keras")
    with np.load(FILES / "similarity.npz") as arrays:
        outputs = model.predict(arrays["inputs"], verbose=0)
        np.testing.assert_allclose(outputs, arrays["outputs"], atol=1e-6)
    shared = [model.get_layer(name).predictor for name in ("shared_1", "shared_2")]
    assert shared[0] is shared[1]
    assert model.get_layer("sparse").kernel_trainable is False
