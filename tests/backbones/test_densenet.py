"""Densely connected networks, against the authors' numbers."""

import re

import keras
import numpy as np
import pytest
from golden_backbones import (
    authors_units,
    authors_variables,
    build_in,
    check_backbone,
    count,
)
from golden_files import DTYPES, Golden
from keras import ops

from nsl_keras import backbones, convert


def modulated(layer):
    """Whether the authors use an iFiLM after this layer."""
    return re.search(r"bottleneck.*_normalization", layer.name)


def authors_name(name):
    """`block_0_bottleneck_3` is their `dense_1_bottleN_3`, and so on."""
    name = name.replace("root", "conv0")
    name = re.sub(r"transition_(\d)", lambda m: f"trans_{int(m[1]) + 1}", name)
    return re.sub(
        r"block_(\d)_bottleneck_(\d+)",
        lambda m: f"dense_{int(m[1]) + 1}_bottleN_{m[2]}",
        name,
    )


def authors_variable(name):
    """In a bottleneck they number the kinds: `bn1`, `film1`, `conv1`, then `bn2` ..."""
    unit, _, rest = name.partition(".")
    if unit.startswith("trans"):
        return f"{unit}." + rest.replace("W", "conv1.W").replace("bn", "bn1")
    unit, layer, number = unit.partition("_layer_")
    if not layer:
        return name
    kind, _, weight = rest.rpartition(".")
    return f"{unit}.{kind or 'conv'}{number}.{weight}"


def our_units(model):
    units = {}
    for name, output in authors_units(model, authors_name).items():
        unit, _, number = name.partition("_layer_")
        if number == "2":
            units[unit] = output
        elif number.endswith(".film"):
            units[f"{unit}film{number}"] = output
    for block in range(3):
        last = model.get_layer(f"block_{block}_bottleneck_11")
        units[f"dense_{block + 1}"] = last.output
        if block < 2:
            units[f"trans_{block + 1}"] = model.get_layer(f"transition_{block}").output
    return units


@pytest.mark.long
@pytest.mark.parametrize("modulate", ["None", "all"])
def test_authors_numbers(modulate):
    def build():
        model = backbones.densenet_bc(
            76, batch_normalization=keras.layers.BatchNormalization
        )
        assert count(model) == 484_140
        assert model.output_shape == (None, 258)
        return model if modulate == "None" else convert.add_film(model, modulated, 10)

    dtype = DTYPES[0]
    model = build_in(dtype, build)
    golden = Golden(f"mn_densenet40_mod{modulate}")
    variables = {
        authors_variable(name): variable
        for name, variable in authors_variables(model, authors_name).items()
    }
    units = our_units(model)
    missing = set(golden.meta["activation_shapes"]) - set(units)
    # What the authors compute between the blocks and throw away, and its parameters.
    unused = {"trans_1film.film", "trans_2film.film"} if modulate == "all" else set()
    assert missing == unused
    parameters = sum(3 * 10 * c + 1 for c in (168, 228)) if unused else 0
    check_backbone(golden, model, variables, dtype, units, unused=parameters)


def test_depth_of_the_paper():
    model = backbones.densenet_bc(40)
    assert count(model) == 174_792
    assert model.output_shape == (None, 132)
    assert model.name == "densenet_bc_40"
    # With the classifier that follows, as many layers with a kernel as the depth says.
    assert len(layers_of(model, keras.layers.Conv2D)) == 39


@pytest.fixture
def small():
    """The smallest depth there is, one bottleneck a block."""

    def make(input_shape=(8, 8, 3), **options):
        return backbones.densenet_bc(10, input_shape, **{"growth": 4, **options})

    return make


def images():
    return np.random.default_rng(2).random((2, 8, 8, 3)).astype("float32")


def layers_of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


def test_growth(small):
    # 2 growth channels at the start, halved twice: (8 + 4) / 2 = 6, (6 + 4) / 2 = 5, 5 + 4.
    model = small()
    assert model.output_shape == (None, 9)
    widths = [layer.filters for layer in layers_of(model, keras.layers.Conv2D)]
    assert widths == [8, 16, 4, 6, 16, 4, 5, 16, 4]
    assert small(growth=6).output_shape == (None, 13)


def test_dropout_follows_each_convolution_but_the_first(small):
    model = small(dropout=0.3)
    convolutions = layers_of(model, keras.layers.Conv2D)
    dropouts = layers_of(model, keras.layers.Dropout)
    assert [layer.input for layer in dropouts] == [c.output for c in convolutions[1:]]
    assert {layer.rate for layer in dropouts} == {0.3}
    assert not layers_of(small(dropout=0.0), keras.layers.Dropout)


def test_seed(small):
    seeds = [layer.seed for layer in layers_of(small(seed=3), keras.layers.Dropout)]
    assert seeds == [3 + index for index in range(8)]
    weights = small().get_weights()

    def trained(seed):
        model = small(seed=seed)
        model.set_weights(weights)
        return ops.convert_to_numpy(model(images(), training=True))

    np.testing.assert_array_equal(trained(1), trained(1))
    assert np.abs(trained(1) - trained(2)).max() > 1e-3


def test_final_relu(small):
    plain, rectified = small(), small(final_relu=True)
    rectified.set_weights(plain.get_weights())
    features = ops.convert_to_numpy(plain(images()))
    assert features.min() < 0
    features = ops.convert_to_numpy(rectified(images()))
    assert features.min() >= 0
    assert features.max() > 0


def test_smallest_image_and_unknown_size(small):
    assert small((4, 4, 1)).output_shape == (None, 9)
    assert tuple(small((None, None, 3))(images()).shape) == (2, 9)


@pytest.mark.parametrize("depth", [0, 4, 39, 41, 40.0])
def test_errors_of_depths(depth):
    message = rf"`depth` must be (of the form 6n \+ 4|a positive integer).*depth={depth}"
    with pytest.raises(ValueError, match=message):
        backbones.densenet_bc(depth)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"growth": 0}, r"`growth` must be a positive integer.*growth=0"),
        ({"dropout": 1.0}, r"`dropout` must be a number in \[0, 1\).*dropout=1.0"),
    ],
    ids=str,
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        backbones.densenet_bc(**options)
