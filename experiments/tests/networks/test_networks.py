"""What the networks of the tables have in common: factories, parameters, features."""

import functools

import numpy as np
import pytest
from golden_backbones import count, layers_of
from keras import ops

from experiments.networks.cnn import cnn9, cnn10
from experiments.networks.densenet import densenet_bc
from experiments.networks.resnet import resnet_v1, resnet_v2
from experiments.networks.spherenet import self_attention_spherenet
from nsl_keras import predictors
from nsl_keras.layers import NeuralSimilarityConv2D

RNG = np.random.default_rng(2)
THREE = {"classes": 5, "filters": (4, 5, 6)}
FOUR = {"classes": 5, "filters": (2, 3, 4, 5)}
#: Small networks: height and width, options, and kernel sizes of what a factory makes.
SMALL = [
    (cnn9, 8, {**THREE, "variant": "paper"}, [3] * 9),
    (cnn9, 8, {**THREE, "plus": True}, [3] * 12),
    (cnn10, 32, THREE, [3] * 9),
    (functools.partial(resnet_v2, 11), 8, {}, [3] * 4),
    (functools.partial(densenet_bc, 10), 8, {"growth": 4}, [3] * 4),
    (functools.partial(resnet_v1, 18), 32, FOUR, [7] + [3] * 16),
]


@pytest.mark.parametrize(("build", "size", "options", "made"), SMALL)
def test_a_factory_makes_the_convolutions_that_may_have_a_similarity(
    build, size, options, made
):
    plain = build(input_shape=(size, size, 3), **options)
    model = build(
        input_shape=(size, size, 3), convolution=NeuralSimilarityConv2D, **options
    )
    found = layers_of(model, NeuralSimilarityConv2D)
    assert [layer.kernel_size for layer in found] == [(n, n) for n in made]
    for layer, ours in zip(plain.layers, model.layers, strict=True):
        if isinstance(ours, NeuralSimilarityConv2D):
            ours.kernel.assign(layer.kernel)
        else:
            ours.set_weights(layer.get_weights())
    images = RNG.random((2, size, size, 3)).astype("float32")
    expected = ops.convert_to_numpy(plain(images))
    assert np.max(np.abs(expected)) > 1e-3
    np.testing.assert_allclose(ops.convert_to_numpy(model(images)), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "features"),
    [(functools.partial(resnet_v2, 11), 256), (functools.partial(densenet_bc, 10), 27)],
)
def test_final_relu_and_images_of_any_size(build, features):
    without, rectified = (
        build(input_shape=(None, None, 3), final_relu=relu) for relu in (False, True)
    )
    rectified.set_weights(without.get_weights())
    for size in (8, 11):
        images = RNG.random((2, size, size, 3)).astype("float32")
        assert ops.convert_to_numpy(without(images)).min() < 0
        found = ops.convert_to_numpy(rectified(images))
        assert found.shape == (2, features)
        assert 0 <= found.min() < found.max()


def similar(similarity, **published):
    predictor = None
    if published:
        predictor = predictors.SimilarityPredictor(start="published", **published)
    convolution = functools.partial(
        NeuralSimilarityConv2D, similarity=similarity, predictor=predictor
    )
    return {"convolution": convolution}


PAPER = {"variant": "paper"}
# The same 17 convolutions of both networks: 16 of 3x3 and one of 7x7.
MASKED = {"input_shape": (None, None, 3), **similar("diagonal")}


@pytest.mark.parametrize(
    ("build", "options", "parameters", "outputs"),
    [
        (cnn9, {"plus": True}, 2_054_525, 10),
        (cnn9, PAPER, 1_008_800, 10),
        (cnn9, PAPER | similar("unconstrained", kind="sphere"), 2_478_752, 10),
        (cnn9, PAPER | {"plus": True}, 2_551_746, 10),
        # Appendix A: 9.26 and 9.71 million.
        (cnn10, similar("diagonal", width=32), 9_257_410, 1000),
        (cnn10, {"plus": True}, 9_706_844, 1000),
        (resnet_v1, {"depth": 18, **MASKED}, 11_689_512 + 16 * 9 + 49, 1000),
        (resnet_v1, {"depth": 50, **MASKED}, 25_557_032 + 16 * 9 + 49, 1000),
        (densenet_bc, {"depth": 40}, 174_792, 132),
        (self_attention_spherenet, {"classes": 100}, 3_949_314, 100),
        (self_attention_spherenet, {"sphere": False}, 3_926_274, 10),
        (self_attention_spherenet, {"attention": False}, 3_859_712, 10),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_parameters_of_the_papers(build, options, parameters, outputs):
    model = build(**options)
    assert count(model) == parameters
    assert model.output_shape == (None, outputs)


@pytest.mark.parametrize(
    ("build", "form"), [(resnet_v2, r"9n \+ 2"), (densenet_bc, r"6n \+ 4")]
)
def test_depths(build, form):
    for depth in (4, 30):
        with pytest.raises(
            ValueError, match=f"`depth` must be of the form {form}.*{depth}"
        ):
            build(depth)
