"""Densely connected networks, against the authors' numbers."""

import re

import keras
import pytest
from golden_backbones import (
    KERAS_NORMALIZATION,
    authors_variables,
    build_in,
    count,
    layers_of,
)
from golden_files import DTYPES, Golden

from experiments.networks.densenet import densenet_bc
from experiments.tests.networks.golden_networks import authors_units, check_backbone
from nsl_keras import convert


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
        model = densenet_bc(76, batch_normalization=KERAS_NORMALIZATION)
        assert count(model) == 484_140
        assert model.output_shape == (None, 258)
        return model if modulate == "None" else convert.add_film(model, modulated)

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
    model = densenet_bc(40)
    assert model.name == "densenet_bc_40"
    # With the classifier that follows, as many layers with a kernel as the depth says.
    assert len(layers_of(model, keras.layers.Conv2D)) == 39


def test_growth_and_dropout():
    # 2 growth channels at the start, halved twice: (8 + 4) / 2 = 6, (6 + 4) / 2 = 5, 5 + 4.
    model = densenet_bc(10, (8, 8, 3), growth=4, dropout=0.3)
    assert model.output_shape == (None, 9)
    convolutions = layers_of(model, keras.layers.Conv2D)
    widths = [layer.filters for layer in convolutions]
    assert widths == [8, 16, 4, 6, 16, 4, 5, 16, 4]
    dropouts = layers_of(model, keras.layers.Dropout)
    assert [layer.input for layer in dropouts] == [c.output for c in convolutions[1:]]
    assert {layer.rate for layer in dropouts} == {0.3}
    without = densenet_bc(10, (8, 8, 3), growth=4, dropout=0.0)
    assert not layers_of(without, keras.layers.Dropout)
