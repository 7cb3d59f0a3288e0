"""Nearest neighbors against NumPy, and what all of the experiments' learners can do."""

import few_shot_episodes as data
import learner_harness as harness
import numpy as np
import pytest
from helpers import as_numpy

from experiments.few_shot.matching import MatchingNet
from experiments.few_shot.nearest_neighbor import NearestNeighbor
from experiments.few_shot.relation import RelationNet


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_nearest_neighbor(metric):
    inputs, _ = data.episodes(batch=3)
    model = NearestNeighbor(data.identity(), data.WAYS, metric=metric)
    support, labels, queries = inputs
    if metric == "cosine":
        found = data.unit(queries) @ data.unit(support).swapaxes(1, 2)
    else:
        found = -((queries[:, :, None] - support[:, None]) ** 2).sum(-1)
    is_own = labels[:, None, :, None] == np.arange(data.WAYS)
    expected = np.where(is_own, found[..., None], -np.inf).max(axis=2)
    np.testing.assert_allclose(model(inputs), expected, rtol=1e-4, atol=1e-5)


MATCHING = harness.metric(MatchingNet, reading_steps=2, temperature=0.1)
RELATION = harness.metric(RelationNet, flat=False, batch_normalization="support")
CASES = [
    harness.LearnerCase("matching", MATCHING),
    harness.LearnerCase("relation", harness.metric(RelationNet, flat=False)),
    harness.LearnerCase("relation_support", RELATION),
    harness.LearnerCase("neighbor", harness.metric(NearestNeighbor), trains=False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_learner(case, tmp_path):
    model, inputs, labels = case.built(**({"run_eagerly": True} if case.trains else {}))
    harness.check_shapes(model, inputs, as_numpy(model(inputs)))
    harness.check_file(case, model, inputs, labels, tmp_path)
    harness.check_adapt(case, tmp_path)
