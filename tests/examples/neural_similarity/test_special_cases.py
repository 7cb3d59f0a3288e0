"""The special cases agree with their layers to rounding, and would show it if not."""

import re

import numpy as np
import pytest

from examples.neural_similarity import special_cases

NAMES = sorted(special_cases.CASES)


def test_differences_are_rounding(capsys):
    found = special_cases.compare()
    assert sorted(found) == NAMES
    for name, (difference, largest) in found.items():
        assert difference <= 2e-6 * largest, name
        assert largest > 0.1, name
    special_cases.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(NAMES)
    for name in found:
        assert any(re.search(rf"\| {re.escape(name)} \| \d\.\de", line) for line in lines)


@pytest.mark.parametrize(
    ("formula", "names"),
    [
        ("local_similarity", ["SphereConv", "convolution"]),
        (
            "global_similarity",
            ["self-attention with softmax", "self-attention, Eq. (11)"],
        ),
    ],
)
def test_another_matrix_is_seen(monkeypatch, formula, names):
    """With M a thousandth larger, the differences are no rounding."""
    general = getattr(special_cases, formula)

    def changed(kernel, matrices, inputs):
        return general(kernel, 1.001 * np.asarray(matrices), inputs)

    monkeypatch.setattr(special_cases, formula, changed)
    found = special_cases.compare()
    for name in NAMES:
        difference, largest = found[name]
        assert (difference > 5e-4 * largest) == (name in names), name
