"""Support sets as dictionaries: against the head of Meta-Neighborhoods, and by hand."""

import few_shot_episodes as data
import numpy as np
import pytest
from layer_harness import as_numpy

from nsl_keras import few_shot
from nsl_keras.layers import CosineDense, MetaNeighborhoodHead, NeighborDictionary


@pytest.mark.parametrize(
    ("steps", "inner_loop", "form"),
    [(1, "dual", "scalar"), (3, "tape", "diagonal")],
)
def test_equals_the_head_with_the_support_as_dictionary(steps, inner_loop, form):
    """Episode by episode, with a layer that keeps the support set in its weights."""
    inputs, _ = data.episodes()
    attention = {"temperature": 0.5, "metric": "euclidean"}
    options = {"inner_steps": steps, "learning_rate_form": form}
    model = few_shot.NeighborhoodLearner(data.identity(), data.WAYS, **attention, **options)
    model(inputs)
    for raw in model.rate.weights:
        raw.assign(np.random.default_rng(0).uniform(0.1, 0.5, raw.shape))
    found = as_numpy(model(inputs))
    for support, labels, queries, own in zip(*inputs, found, strict=True):
        values = np.eye(data.WAYS)[labels]
        layer = CosineDense(data.WAYS)
        layer.build((None, data.SIZE))
        prototypes = values.T @ data.unit(support) / data.SHOTS
        layer.set_weights([prototypes.T, np.array(10.0)])
        adapted = MetaNeighborhoodHead(
            layer,
            NeighborDictionary(len(support), fixed_values=values, **attention),
            inner_loop=inner_loop,
            **options,
        )
        adapted.build((None, data.SIZE))
        adapted.dictionary.assign(keys=support)
        adapted.learning_rate.set_weights(model.rate.get_weights())
        np.testing.assert_allclose(own, adapted(queries), rtol=1e-4, atol=1e-4)


def test_rate_zero_is_the_nearest_centroid():
    inputs, _ = data.episodes()
    model = few_shot.NeighborhoodLearner(data.identity(), data.WAYS, scale=7.0)
    adapted = as_numpy(model(inputs))
    (raw,) = model.rate.weights
    raw.assign(0.0)
    centroids = few_shot.NearestCentroid(data.identity(), data.WAYS)
    expected = 7 * as_numpy(centroids(inputs))
    np.testing.assert_allclose(model(inputs), expected, rtol=1e-5, atol=1e-5)
    assert np.abs(adapted - expected).max() > 0.01
