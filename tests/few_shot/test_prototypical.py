"""Prototypes against NumPy."""

import few_shot_episodes as data
import numpy as np
import pytest
from keras import ops

from nsl_keras.few_shot import ProtoNet


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_comparison_with_the_means_of_unequal_shots(metric):
    """By cosines, or by minus the squared distances."""
    (support, _, queries), _ = data.episodes()
    labels = np.array([[0, 0, 0, 0, 1, 2], [2, 1, 1, 0, 2, 1]])
    model = ProtoNet(data.identity(), data.WAYS, metric=metric, temperature=0.1)
    membership = np.eye(data.WAYS)[labels]
    means = np.einsum("bsw,bsd->bwd", membership, support) / membership.sum(1)[..., None]
    expected = data.scores(queries, means, metric)
    found = model((support, labels, queries))
    np.testing.assert_allclose(found, expected / 0.1, rtol=1e-5, atol=1e-5)


def test_the_temperature_is_learned_by_its_logarithm():
    inputs, _ = data.episodes()
    model = ProtoNet(data.identity(), data.WAYS, temperature=4.0, learn_temperature=True)
    fixed = ProtoNet(data.identity(), data.WAYS, temperature=4.0)
    logits = ops.convert_to_numpy(fixed(inputs))
    np.testing.assert_allclose(model(inputs), logits, rtol=1e-6)
    (variable,) = model.trainable_variables
    assert np.isclose(float(variable.value), np.log(4.0)) and not fixed.weights
    variable.assign(np.log(2.0))
    np.testing.assert_allclose(model(inputs), 2 * logits, rtol=1e-5)
