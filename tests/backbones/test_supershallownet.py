"""The authors' 2-layer network, of public layers, against their numbers."""

import pytest
from golden_backbones import (
    authors_variables,
    build_in,
    check_backbone,
    supershallownet,
)
from golden_files import DTYPES, Golden


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("film", [None, 10])
def test_authors_numbers(film, dtype):
    model = build_in(dtype, lambda: supershallownet((32, 32, 3), film))
    golden = Golden(f"mn_supershallownet_mod{'None' if film is None else 'all'}")
    units = {
        f"film{index}": model.get_layer(f"conv{index}_film").output
        for index in range(0 if film is None else 2)
    }
    check_backbone(golden, model, authors_variables(model), dtype, units or None)
