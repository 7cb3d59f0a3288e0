"""The shallow networks of Meta-Neighborhoods, against the authors' numbers."""

import pytest
from golden_backbones import (
    KERAS_NORMALIZATION,
    authors_variables,
    build_in,
    supershallownet,
)
from golden_files import DTYPES, Golden

from experiments.tests.networks.golden_networks import authors_units, check_backbone
from nsl_keras import backbones, convert


@pytest.mark.parametrize("network", ["shallownet", "supershallownet"])
@pytest.mark.parametrize("modulate", ["None", "all"])
def test_authors_numbers(network, modulate):
    dtype = DTYPES[0]

    def build():
        if network == "shallownet":
            model = backbones.convnet4(batch_normalization=KERAS_NORMALIZATION)
        else:
            model = supershallownet((32, 32, 3))
        return model if modulate == "None" else convert.add_film(model, "all")

    def authors_name(unit):
        return unit.replace("layer_", "conv")

    model = build_in(dtype, build)
    units = {
        name.replace("conv", "film").removesuffix(".film"): output
        for name, output in authors_units(model, authors_name).items()
        if name.endswith(".film")
    }
    golden = Golden(f"mn_{network}_mod{modulate}")
    variables = authors_variables(model, authors_name)
    check_backbone(golden, model, variables, dtype, units or None)
