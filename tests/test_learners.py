"""Every learner through the harness."""

import learner_harness
import pytest

CASES = {case.name: case for case in learner_harness.CASES}


@pytest.mark.parametrize("name", CASES)
def test_learner(name, tmp_path):
    learner_harness.check_learner(CASES[name], tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        each
        if each in ("proto", "centroid")
        else pytest.param(each, marks=pytest.mark.long)
        for each in CASES
    ],
)
def test_compiled(name, tmp_path):
    learner_harness.check_compiled(CASES[name], tmp_path)
