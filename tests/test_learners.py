"""Every learner through the harness."""

import learner_harness
import pytest

CASES = {case.name: case for case in learner_harness.CASES}
ADAPTABLE = learner_harness.adaptable()
#: In graphs, a neighborhood takes several inner steps.
COMPILED = ("proto", "neighborhood_steps", "maml", "meta_neighborhoods")


@pytest.mark.parametrize("name", CASES)
def test_learner(name, tmp_path):
    learner_harness.check_learner(CASES[name], tmp_path)


@pytest.mark.parametrize("name", ADAPTABLE)
def test_adapt(name, tmp_path):
    learner_harness.check_adapt(ADAPTABLE[name], tmp_path)


# Several inner steps of Meta-Neighborhoods need gradients, which the other engines lack.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["proto_distance", "neighborhood", "centroid"])
def test_export_of_adapted_models(name, tmp_path):
    learner_harness.check_adapted_export(ADAPTABLE[name], tmp_path)


@pytest.mark.parametrize(
    "name", ["centroid", *(pytest.param(each, marks=pytest.mark.long) for each in COMPILED)]
)
def test_compiled(name):
    learner_harness.check_compiled((CASES | ADAPTABLE)[name])


@pytest.mark.long
@pytest.mark.skipif(not learner_harness.IS_TENSORFLOW, reason="JAX fixes the numbers")
@pytest.mark.parametrize("name", ["proto", "neighborhood", "maml"])
def test_exported_learners_take_any_number_of_images(name, tmp_path):
    learner_harness.check_exported_episodes(CASES[name], tmp_path)
