"""Residual networks, against the authors' numbers and Keras's ResNet-50."""

import functools

import keras
import numpy as np
import pytest
from golden_backbones import (
    KERAS_NORMALIZATION,
    authors_variables,
    build_in,
    count,
)
from golden_files import DTYPES, Golden
from keras import ops

from experiments.networks.resnet import resnet_v1, resnet_v2
from experiments.tests.networks.golden_networks import (
    authors_units,
    check_backbone,
    with_films,
)

PARAMETERS = {29: 838_160, 56: 1_655_120}


def authors_name(unit):
    """Their `conv0` is our root, their `layer_4` our shortcut."""
    return unit.replace("root", "conv0").replace("shortcut", "layer_4")


def modulated(layer):
    """Whether the authors have an iFiLM after what is this layer here."""
    ends = ("_normalization", "_shortcut_convolution", "_layer_1_input")
    return layer.name.endswith(ends) and layer.name != "root_normalization"


def check_authors_numbers(depth, modulate, dtype):
    def build():
        model = resnet_v2(depth, batch_normalization=KERAS_NORMALIZATION)
        assert count(model) == PARAMETERS[depth]
        assert model.name == f"resnet_v2_{depth}"
        return model if modulate == "None" else with_films(model, modulated)

    model = build_in(dtype, build)
    golden = Golden(f"mn_resnet{depth}_mod{modulate}")
    variables = authors_variables(model, authors_name)
    units = authors_units(model, authors_name)
    # Their units end with the convolution, except the first one, and the shortcuts with
    # an iFiLM.
    units["conv0"] = model.get_layer("root_relu").output
    if modulate == "all":
        units |= {unit: units[f"{unit}.film"] for unit in units if unit.endswith("layer_4")}
    assert set(units) == set(golden.meta["activation_shapes"])
    check_backbone(golden, model, variables, dtype, units)


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=pytest.mark.long if dtype == "float64" else ())
        for dtype in DTYPES
    ],
)
def test_authors_numbers_at_depth_29(dtype):
    check_authors_numbers(29, "None", dtype)


@pytest.mark.parametrize(("depth", "modulate"), [(29, "all"), (56, "None"), (56, "all")])
@pytest.mark.long
def test_authors_numbers(depth, modulate):
    # In float32 an activation next to zero may change its sign, and with it the gradients
    # before it, by up to 1e-2.
    check_authors_numbers(depth, modulate, DTYPES[0])


@pytest.mark.long
def test_resnet50_is_that_of_keras():
    reference = keras.applications.ResNet50(
        weights=None, input_shape=(64, 64, 3), classes=3, classifier_activation=None
    )
    model = resnet_v1(
        50,
        (64, 64, 3),
        3,
        batch_normalization=functools.partial(
            keras.layers.BatchNormalization, epsilon=1.001e-5
        ),
    )
    rng = np.random.default_rng(0)
    pairs = {"root": "conv1", "classifier": "predictions"}
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            for layer in range(4):
                role = f"layer_{layer}" if layer else "shortcut"
                theirs = f"conv{stage + 2}_block{block + 1}_{layer}"
                pairs[f"stage_{stage}_block_{block}_{role}"] = theirs
    copied = 0
    for layer in model.layers:
        name, _, role = layer.name.rpartition("_")
        suffix = {"convolution": "_conv", "normalization": "_bn"}.get(role, "")
        name = name if suffix else layer.name
        if not layer.weights:
            continue
        twin = reference.get_layer(pairs[name] + suffix)
        # Theirs have a bias, zero at the start, before batch norm.
        for ours, other in zip(layer.weights, twin.weights, strict=False):
            value = ops.convert_to_numpy(other)
            if role == "normalization":
                value = rng.uniform(0.5, 1.0, value.shape).astype("float32")
                other.assign(value)
            ours.assign(value)
            copied += 1
    assert copied == len(model.weights)
    pictures = rng.normal(size=(1, 64, 64, 3)).astype("float32")
    expected = ops.convert_to_numpy(reference(pictures))
    found = ops.convert_to_numpy(model(pictures))
    error = np.max(np.abs(found - expected)) / np.max(np.abs(expected))
    assert error < 1e-4
