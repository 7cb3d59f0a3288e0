"""The self-attention SphereNet and its three relatives of the paper's Table 8."""

import numpy as np
import pytest
from golden_backbones import layers_of
from golden_files import DTYPES, Golden, gradients
from helpers import assert_equal, randomize
from keras import ops

from experiments.networks.spherenet import (
    OrthogonalityRegularizer,
    self_attention_spherenet,
)
from nsl_keras.layers import GlobalNeuralSimilarity2D, SphereConv2D

ALL_FOUR = [(attention, sphere) for attention in (True, False) for sphere in (True, False)]
IMAGES = np.random.default_rng(2).random((2, 9, 8, 3)).astype("float32")


def small(**options):
    return self_attention_spherenet(
        **{"input_shape": (9, 8, 3), "classes": 4, "filters": (32, 32, 10), **options}
    )


def test_layout():
    model = self_attention_spherenet()
    shapes = {layer.name: tuple(layer.output.shape[1:]) for layer in model.layers}
    assert shapes["stage_0_layer_2_relu"] == (32, 32, 128)
    assert shapes["stage_0_attention"] == (16, 16, 128)
    assert shapes["stage_1_attention"] == (8, 8, 192)
    assert shapes["stage_2_pool"] == (4, 4, 256)
    assert shapes["features_convolution"] == (1, 1, 256)
    kernels = layers_of(model, SphereConv2D)
    assert len(kernels) == 10
    assert {(layer.normalize, layer.response) for layer in kernels} == {("both", "cosine")}
    assert kernels[0].kernel.shape == (3, 3, 3, 128)
    assert kernels[-1].kernel.shape == (4, 4, 256, 256)
    # After the features there is nothing but the classifier.
    assert [layer.name for layer in model.layers[-3:]] == [
        "features_convolution",
        "flatten",
        "classifier",
    ]


@pytest.mark.parametrize(("attention", "sphere"), ALL_FOUR)
def test_the_four_networks(attention, sphere):
    model = small(attention=attention, sphere=sphere)
    attentions = layers_of(model, GlobalNeuralSimilarity2D)
    assert [layer.sphere for layer in attentions] == [sphere] * 2 * attention
    assert bool(layers_of(model, SphereConv2D)) == sphere
    randomize(model.trainable_variables, 0.1)
    found = gradients(
        lambda images: ops.sum(ops.square(model(images, training=True))),
        [IMAGES],
        model.trainable_variables,
    )
    for variable, gradient in zip(model.trainable_variables, found[1:], strict=True):
        gradient = ops.convert_to_numpy(gradient)
        assert np.all(np.isfinite(gradient)), variable.path
        assert np.any(gradient), variable.path


def test_attention_starts_as_no_attention():
    with_attention, without = small(), small(attention=False)
    for layer in without.layers[1:]:
        layer.set_weights(with_attention.get_layer(layer.name).get_weights())
    assert_equal(with_attention(IMAGES), without(IMAGES))


def penalties(model):
    """The number of penalized weights by kind: kernels, attention, norms, classifier."""
    found = {"orthogonality": set(), "l2": set()}
    for variable in model.trainable_variables:
        regularizer = variable.regularizer
        if isinstance(regularizer, OrthogonalityRegularizer):
            assert regularizer.strength == 1e-4
            found["orthogonality"].add(variable.path)
        if getattr(regularizer, "l2", 0):
            assert regularizer.l2 == 2.5e-4
            found["l2"].add(variable.path)
    return found


def test_penalties_of_the_authors():
    model = small(orthogonality=1e-4, l2=2.5e-4)
    found = penalties(model)
    assert len(found["orthogonality"]) == 16
    # Six kernels of attention, the classifier's, scale and shift of nine batch norms.
    assert len(found["l2"]) == 6 + 1 + 18
    assert not any("gamma" in path for path in found["orthogonality"])
    assert len(model.losses) == 10 + 6 + 1 + 18
    found = penalties(small(orthogonality=1e-4, l2=2.5e-4, sphere=False))
    assert len(found["orthogonality"]) == 16
    assert len(found["l2"]) == 16 + 1 + 18
    assert small().losses == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_authors_penalties(dtype):
    golden = Golden("nsl_gns_conv")
    layer = SphereConv2D(
        6, 3, kernel_regularizer=OrthogonalityRegularizer(1e-4), dtype=dtype
    )
    layer.build(golden["in.x"].shape)
    layer.kernel.assign(golden["w.W"])
    golden.check("out64.orth_loss", layer.losses[0], dtype)
    kernel = ops.convert_to_tensor(layer.kernel)
    (gradient,) = gradients(layer.kernel_regularizer, [kernel])
    golden.check("grad64.orth_loss.W", gradient, dtype)

    golden = Golden("nsl_gns_attention")
    kernels = [
        ops.convert_to_tensor(golden[f"w.att_{which}.W"], dtype=dtype)
        for which in ("first", "second", "third")
    ]
    for regularizer, key in (
        (OrthogonalityRegularizer(1e-4), "orth_loss"),
        (OrthogonalityRegularizer(0.0, l2=2.5e-4), "reg_loss"),
    ):
        golden.check(f"out64.{key}", sum(map(regularizer, kernels)), dtype)
