"""What all backbones have in common: factories, options, data formats, errors."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from layer_harness import IS_TENSORFLOW

import nsl_keras
from nsl_keras import backbones
from nsl_keras.layers import NeuralSimilarityConv2D
from nsl_keras.predictors import SharedSimilarityPredictor, SimilarityPredictor


@dataclasses.dataclass
class Case:
    """A small version of a backbone.

    Attributes:
        build: The backbone.
        size: Height and width; one pixel is left at the end.
        options: Arguments that make it small.
        from_factory: Kernel sizes of the convolutions that the factory makes.
        features: Number of features.
        convolutions: Number of all convolutions, the features' included.
    """

    build: Callable[..., keras.Model]
    size: int
    options: dict[str, Any]
    from_factory: list[int]
    features: int
    convolutions: int

    def __call__(self, **options):
        defaults = {"input_shape": (self.size, self.size, 3)}
        return self.build(**{**defaults, **self.options, **options})

    def images(self):
        shape = (2, self.size, self.size, 3)
        return np.random.default_rng(2).random(shape).astype("float32")


THREE = {"filters": (4, 5, 6), "classes": None}
FOUR = {"filters": (2, 3, 4, 5), "classes": None}
# ResNet-50 differs from ResNet-18 in its blocks alone, the two variants of CNN-9 in the
# layers before and after the stages: their own tests count what the factory makes.
CASES = {
    "convnet4": Case(backbones.convnet4, 9, {"filters": (4, 5, 6, 7)}, [3] * 4, 7, 4),
    "cnn4": Case(backbones.cnn4, 16, {"filters": 4, "classes": None}, [3] * 4, 4, 4),
    "cnn9": Case(backbones.cnn9, 8, THREE, [3] * 9, 6, 10),
    "cnn10": Case(backbones.cnn10, 32, THREE, [3] * 9, 512, 10),
    "resnet_v2": Case(backbones.resnet_v2, 8, {"depth": 11}, [3] * 4, 256, 13),
    "densenet": Case(backbones.densenet_bc, 8, {"depth": 10, "growth": 4}, [3] * 4, 9, 9),
    "resnet18": Case(backbones.resnet18, 32, FOUR, [7] + [3] * 16, 5, 20),
    "spherenet": Case(
        backbones.self_attention_spherenet,
        8,
        {**THREE, "sphere": False, "attention": False},
        [3] * 9 + [1],
        6,
        10,
    ),
}
each_network = pytest.mark.parametrize("name", CASES)


def layers_of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


def run(model, images, **options):
    return ops.convert_to_numpy(model(images, **options))


@functools.cache
def plain(name):
    """The network without options, which all tests share."""
    return CASES[name]()


@each_network
def test_a_factory_makes_the_convolutions_that_may_have_a_similarity(name):
    case, plain_model = CASES[name], plain(name)
    model = case(convolution=NeuralSimilarityConv2D)
    made = layers_of(model, NeuralSimilarityConv2D)
    assert [layer.kernel_size for layer in made] == [(n, n) for n in case.from_factory]
    assert not layers_of(plain_model, NeuralSimilarityConv2D)
    for layer, ours in zip(plain_model.layers, model.layers, strict=True):
        assert layer.name == ours.name or not layer.weights
        if isinstance(ours, NeuralSimilarityConv2D):
            assert not ours.use_bias
            ours.kernel.assign(layer.kernel)
        else:
            ours.set_weights(layer.get_weights())
    expected = run(plain_model, case.images())
    assert expected.shape == (2, case.features)
    assert np.max(np.abs(expected)) > 1e-3
    np.testing.assert_allclose(run(model, case.images()), expected, atol=1e-5)


def test_a_recipe_gives_each_convolution_its_own_network():
    recipe = SimilarityPredictor(width=3)
    case = CASES["resnet18"]
    model = case(convolution=functools.partial(NeuralSimilarityConv2D, predictor=recipe))
    found = layers_of(model, NeuralSimilarityConv2D)
    assert len({id(each.comparison.network) for each in found}) == len(case.from_factory)
    assert np.all(np.isfinite(run(model, case.images(), training=True)))


def test_a_factory_gives_all_convolutions_one_predictor():
    case = CASES["cnn9"]
    shared = SharedSimilarityPredictor(SimilarityPredictor(width=3), adapted_filters=2)
    model = case(convolution=functools.partial(NeuralSimilarityConv2D, predictor=shared))
    found = layers_of(model, NeuralSimilarityConv2D)
    assert all(layer.predictor is shared for layer in found)
    assert np.all(np.isfinite(run(model, case.images())))


@each_network
def test_options(name):
    case = CASES[name]
    options = {"batch_normalization_epsilon": 0.01}
    if case.build in (backbones.convnet4, backbones.resnet_v2, backbones.densenet_bc):
        options = {}
    if case.build is not backbones.self_attention_spherenet:
        options["kernel_regularizer"] = "l2"
    model = case(
        batch_normalization_momentum=0.7,
        synchronized=IS_TENSORFLOW,  # Keras has it on TensorFlow and PyTorch alone.
        name="mine",
        **options,
    )
    assert model.name == "mine"
    epsilon = options.get("batch_normalization_epsilon", 1e-3)
    found = {
        (layer.momentum, layer.epsilon, layer.synchronized)
        for layer in layers_of(model, keras.layers.BatchNormalization)
    }
    assert found == {(0.7, epsilon, IS_TENSORFLOW)}
    assert len(layers_of(model, keras.layers.Conv2D)) == case.convolutions
    if "kernel_regularizer" in options:
        kernels = case.convolutions + len(layers_of(model, keras.layers.Dense))
        assert len(model.losses) == kernels


def test_kernels_start_apart():
    model = CASES["cnn9"]()
    kernels = {layer.kernel.shape: [] for layer in layers_of(model, keras.layers.Conv2D)}
    for layer in layers_of(model, keras.layers.Conv2D):
        kernels[layer.kernel.shape].append(ops.convert_to_numpy(layer.kernel))
    for same in kernels.values():
        for one, other in itertools.combinations(same, 2):
            assert np.abs(one - other).max() > 0


@each_network
def test_channels_first_computes_the_same(name):
    case, last = CASES[name], plain(name)
    rng = np.random.default_rng(1)
    weights = [0.3 * np.abs(rng.normal(size=v.shape)) for v in last.weights]
    last.set_weights(weights)
    keras.config.set_image_data_format("channels_first")
    try:
        first = case(input_shape=(3, case.size, case.size))
        first.set_weights(weights)
        received = run(first, np.moveaxis(case.images(), -1, 1))
    finally:
        keras.config.set_image_data_format("channels_last")
    expected = run(last, case.images())
    error = np.max(np.abs(received - expected)) / np.max(np.abs(expected))
    assert error < 1e-4


@pytest.mark.parametrize("build", [getattr(backbones, name) for name in backbones.__all__])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"convolution": "diagonal"},
            r"`convolution` must be a callable .*convolution='diagonal'",
        ),
        (
            {
                "batch_normalization": functools.partial(
                    nsl_keras.layers.BatchNormalization, momentum=0.5
                )
            },
            "`batch_normalization` must leave `momentum` to the network",
        ),
        (
            {"convolution": functools.partial(keras.layers.Conv2D, use_bias=True)},
            "`convolution` must leave `use_bias` to the network",
        ),
        (
            {"batch_normalization_momentum": 1.0},
            r"`batch_normalization_momentum` must be a number in \[0, 1\).*=1.0",
        ),
    ],
    ids=["convolution", "fixed_momentum", "fixed_bias", "momentum"],
)
def test_errors_of_options(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_a_fixed_regularizer_holds_where_none_is_given():
    convolution = functools.partial(keras.layers.Conv2D, kernel_regularizer="l2")
    small = {"input_shape": (8, 8, 3), "convolution": convolution}
    assert backbones.convnet4(**small).losses
    with pytest.raises(ValueError, match="must leave `kernel_regularizer`"):
        backbones.convnet4(kernel_regularizer="l1", **small)


def small_images(height, width):
    return {"input_shape": (height, width, 3)}


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (backbones.convnet4, small_images(None, 6), r"must be at least 7x7 .*\(None, 6, 3"),
        (backbones.densenet_bc, small_images(3, 8), r"must be at least 4x4 .*\(3, 8, 3\)"),
        (backbones.cnn9, small_images(7, 32), r"`input_shape` must be .*8x8"),
        (backbones.cnn9, {"input_shape": (32, 32, None)}, "number of channels.*None"),
        (backbones.cnn4, {"input_shape": (32, 32, 0)}, r"number of channels.*32, 0\)"),
        (backbones.cnn9, small_images(None, 32), r"must be of known size.*None"),
        (backbones.cnn10, small_images(31, 32), r"`input_shape` must .*32x32"),
        (backbones.cnn4, small_images(15, 32), r"`input_shape` must .*16x16"),
        (
            backbones.self_attention_spherenet,
            small_images(7, 8),
            r"`input_shape` must be .*8x8.*\(7, 8, 3\)",
        ),
        (backbones.convnet4, {"filters": (1, 2, 3)}, r"`filters` must be .* 4 of them"),
        (backbones.cnn4, {"filters": 0}, r"`filters` must be a positive .*filters=0"),
        (backbones.cnn9, {"filters": 3.0}, r"`filters` must be .*filters=3.0"),
        (backbones.cnn10, {"filters": (1, 2)}, r"`filters` must be .*3 of them"),
        (backbones.resnet50, {"filters": (1, 2, 3, 0)}, r"`filters` must be .*4 of them"),
        (
            backbones.self_attention_spherenet,
            {"filters": (1, 2)},
            r"`filters` must be .*3 of them",
        ),
        (backbones.cnn9, {"variant": "x"}, r"`variant` must be one of 'code', 'paper'"),
        (
            backbones.cnn9,
            {"batch_normalization_epsilon": 0.0},
            r"`batch_normalization_epsilon` must be",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_errors(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize("backbone", [backbones.cnn4, backbones.cnn9, backbones.resnet18])
@pytest.mark.parametrize("classes", [0, -1, True, "10"])
def test_error_of_the_number_of_classes(backbone, classes):
    with pytest.raises(ValueError, match="`classes` must be a positive integer"):
        backbone((32, 32, 3), classes=classes)


@pytest.mark.parametrize(
    "backbone",
    [
        backbones.cnn9,
        backbones.convnet4,
        backbones.resnet18,
        functools.partial(backbones.resnet_v2, 29),
        functools.partial(backbones.densenet_bc, 40),
    ],
)
def test_error_of_images_without_channels(backbone):
    with pytest.raises(ValueError, match=r"`input_shape` must have three axes.*\(32, 32\)"):
        backbone(input_shape=(32, 32))
