"""What the backbones have in common: factories, options, data formats, errors."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from golden_backbones import count, layers_of
from helpers import as_numpy, assert_close, normal, randomize, refusing
from keras import ops

import nsl_keras
from nsl_keras import backbones, predictors
from nsl_keras.layers import NeuralSimilarityConv2D


@dataclasses.dataclass
class Case:
    """A small version of a backbone.

    One pixel of the images is left at its end. The factory makes convolutions of 3x3.
    """

    build: Callable[..., keras.Model]
    size: int
    options: dict[str, Any]
    from_factory: int
    features: int

    def __call__(self, **options):
        defaults = {"input_shape": (self.size, self.size, 3)}
        return self.build(**{**defaults, **self.options, **options})

    def images(self):
        return normal(2, self.size, self.size, 3)


CASES = {
    "convnet4": Case(backbones.convnet4, 9, {"filters": (4, 5, 6, 7)}, 4, 7),
    "cnn4": Case(backbones.cnn4, 16, {"filters": 4, "classes": None}, 4, 4),
    "cnn9": Case(backbones.cnn9, 8, {"filters": (4, 5, 6), "classes": None}, 9, 6),
}
each_network = pytest.mark.parametrize("name", CASES)


@functools.cache
def plain(name):
    """The network without options, which all tests share."""
    return CASES[name]()


@each_network
def test_a_factory_makes_the_convolutions_that_may_have_a_similarity(name):
    """Another does the batch norms, and the network takes a name."""
    case, plain_model = CASES[name], plain(name)
    normalization = functools.partial(nsl_keras.layers.BatchNormalization, momentum=0.7)
    options = {"batch_normalization": normalization, "name": "mine"}
    model = case(convolution=NeuralSimilarityConv2D, **options)
    assert model.name == "mine"
    norms = layers_of(model, nsl_keras.layers.BatchNormalization)
    assert {layer.momentum for layer in norms} == {0.7}
    made = layers_of(model, NeuralSimilarityConv2D)
    assert [layer.kernel_size for layer in made] == [(3, 3)] * case.from_factory
    assert not layers_of(plain_model, NeuralSimilarityConv2D)
    for layer, ours in zip(plain_model.layers, model.layers, strict=True):
        assert layer.name == ours.name or not layer.weights
        if isinstance(ours, NeuralSimilarityConv2D):
            assert not ours.use_bias
            ours.kernel.assign(layer.kernel)
        else:
            ours.set_weights(layer.get_weights())
    expected = as_numpy(plain_model(case.images()))
    assert expected.shape == (2, case.features)
    assert np.max(np.abs(expected)) > 1e-3
    np.testing.assert_allclose(model(case.images()), expected, atol=1e-5)


def test_kernels_start_apart():
    convolutions = layers_of(CASES["cnn9"](), keras.layers.Conv2D)
    kernels = {ops.convert_to_numpy(layer.kernel).tobytes() for layer in convolutions}
    assert len(kernels) == len(convolutions)


@each_network
def test_channels_first_computes_the_same(name):
    case, last = CASES[name], plain(name)
    randomize(last, positive=True)
    keras.config.set_image_data_format("channels_first")
    first = case(input_shape=(3, case.size, case.size))
    first.set_weights(last.get_weights())
    received = first(np.moveaxis(case.images(), -1, 1))
    assert_close(received, last(case.images()), 1e-4)


def test_images_of_any_size():
    case = CASES["convnet4"]
    model = case(input_shape=(None, None, 3))
    for size in (case.size, case.size + 3):
        images = np.zeros((2, size, size, 3), "float32")
        assert tuple(model(images).shape) == (2, case.features)


def similar(similarity, predictor=None):
    convolution = functools.partial(
        NeuralSimilarityConv2D, similarity=similarity, predictor=predictor
    )
    return {"convolution": convolution}


STATIC = similar("unconstrained")
PUBLISHED = predictors.SimilarityPredictor(start="published")


@pytest.mark.parametrize(
    ("build", "options", "parameters", "outputs"),
    [
        (backbones.convnet4, {}, 520_056, 192),
        (backbones.convnet4, STATIC, 520_056 + 4 * 81, 192),
        (backbones.convnet4, {"filters": (2, 3, 4, 5)}, 9 * 44 + 2 * 14, 5),
        (backbones.cnn4, {}, 28_768 + 801 * 5, 5),
        (backbones.cnn4, STATIC, 28_768 + 4 * 81 + 801 * 5, 5),
        (backbones.cnn4, similar("diagonal", PUBLISHED), 107_112 + 801 * 5, 5),
        (backbones.cnn9, {}, 511_200, 10),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_parameters_of_the_papers(build, options, parameters, outputs):
    model = build(**options)
    assert count(model) == parameters
    assert model.output_shape == (None, outputs)


test_errors = refusing(
    (lambda: backbones.convnet4((None, 6, 3)), r"at least 7x7 .*\(None, 6, 3"),
    (lambda: backbones.cnn9((7, 32, 3)), "`input_shape` must .*8x8"),
    (lambda: backbones.cnn9((None, 32, 3)), "`input_shape` must .*8x8"),
    (lambda: backbones.cnn4((15, 32, 3)), "`input_shape` must .*16x16"),
    (lambda: backbones.convnet4(filters=(1, 2, 3)), "`filters` must be .* 4 of them"),
    (lambda: backbones.cnn4(filters=0), "`filters` must be a positive .*filters=0"),
    (lambda: backbones.cnn9(filters=3.0), "`filters` must be .*filters=3.0"),
)
