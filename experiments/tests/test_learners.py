"""Learners of the few-shot table against NumPy, and what all of them can do."""

import few_shot_episodes as data
import keras
import learner_harness as harness
import numpy as np
import pytest
from helpers import as_numpy
from keras import ops

import nsl_keras
from experiments.few_shot.learners import (
    MatchingNet,
    NearestNeighbor,
    RelationLoss,
    RelationNet,
    relation_module,
)

SHAPE = (4, 5, 2)


def test_scores_of_all_pairs():
    """Each query's map joined to the sum of each class's maps, one pair at a time."""
    inputs, _ = data.episodes(shape=SHAPE)
    support, labels, queries = inputs
    model = RelationNet(data.identity(*SHAPE), data.WAYS)
    found = as_numpy(model(inputs))
    for episode, query, way in np.ndindex(found.shape):
        total = support[episode][labels[episode] == way].sum(axis=0)
        pair = np.concatenate([total, queries[episode, query]], axis=-1)[None]
        expected = as_numpy(model.relation(pair))[0, 0]
        np.testing.assert_allclose(
            found[episode, query, way], expected, rtol=1e-4, atol=1e-5
        )


def test_the_default_module():
    """Figure 2: convolutions, batch norms, the layers of 8 and 1 units."""
    module = relation_module((7, 7, 128))
    shapes = [tuple(each.shape) for each in module.trainable_variables if each.ndim > 1]
    assert shapes == [(3, 3, 128, 64), (3, 3, 64, 64), (64, 8), (8, 1)]


@pytest.mark.parametrize("policy", ["support", "transductive"])
def test_statistics_of_pairs(policy):
    pair = keras.Input((*SHAPE[:2], 2 * SHAPE[2]))
    norm = nsl_keras.layers.BatchNormalization()
    pooled = keras.layers.GlobalAveragePooling2D()(norm(pair))
    relation = keras.Model(pair, keras.layers.Dense(1)(pooled))
    model = RelationNet(
        data.identity(*SHAPE), data.WAYS, relation, batch_normalization=policy
    )
    (support, labels, queries), _ = data.episodes(shape=SHAPE)
    found = as_numpy(model((support, labels, queries)))
    kernel, bias = (as_numpy(each) for each in relation.layers[-1].weights)
    for episode in range(len(support)):
        sums = [support[episode][labels[episode] == way].sum(0) for way in range(data.WAYS)]

        def pairs(maps, sums=sums):
            return np.array(
                [[np.concatenate([s, image], axis=-1) for s in sums] for image in maps]
            )

        seen = pairs(support[episode] if policy == "support" else queries[episode])
        mean, variance = seen.mean(axis=(0, 1, 2, 3)), seen.var(axis=(0, 1, 2, 3))
        normalized = (pairs(queries[episode]) - mean) / np.sqrt(variance + norm.epsilon)
        expected = (normalized.mean(axis=(2, 3)) @ kernel + bias)[..., 0]
        np.testing.assert_allclose(found[episode], expected, rtol=1e-3, atol=1e-4)


def test_loss():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 4, 3)).astype("float32")
    labels = rng.integers(0, 3, size=(2, 4))
    scores = 1 / (1 + np.exp(-logits))
    expected = ((scores - np.eye(3)[labels]) ** 2).mean()
    loss = RelationLoss()
    np.testing.assert_allclose(loss(labels, logits), expected, rtol=1e-5)
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(again).__name__ == "RelationLoss" and again.name == loss.name


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attended_labels(support, labels, queries, temperature):
    """Class probabilities: attention on the labels."""
    cosines = np.einsum("bqd,bsd->bqs", data.unit(queries), data.unit(support))
    return softmax(cosines / temperature) @ np.eye(data.WAYS)[labels]


@pytest.mark.parametrize("temperature", [1.0, 0.01, 1e-3])
def test_attention_on_the_labels(temperature):
    """Of probabilities that are less than a float holds, too."""
    inputs, _ = data.episodes()
    model = MatchingNet(data.identity(), data.WAYS, "cosine", temperature)
    found = ops.convert_to_numpy(model(inputs))
    expected = attended_labels(*inputs, temperature)
    np.testing.assert_allclose(np.exp(found), expected, rtol=1e-3, atol=1e-6)
    assert np.all(np.isfinite(found)) and (temperature > 1e-3 or found.min() < -150)
    assert not model.trainable_variables


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_nearest_neighbor(metric):
    inputs, _ = data.episodes(batch=3)
    model = NearestNeighbor(data.identity(), data.WAYS, metric, normalize=False)
    support, labels, queries = inputs
    if metric == "cosine":
        found = data.unit(queries) @ data.unit(support).swapaxes(1, 2)
    else:
        found = -((queries[:, :, None] - support[:, None]) ** 2).sum(-1)
    is_own = labels[:, None, :, None] == np.arange(data.WAYS)
    expected = np.where(is_own, found[..., None], -np.inf).max(axis=2)
    np.testing.assert_allclose(model(inputs), expected, rtol=1e-4, atol=1e-5)


MATCHING = harness.metric(MatchingNet, metric="cosine", temperature=0.1)
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
    outputs = as_numpy(model(inputs))
    harness.check_shapes(model, inputs, outputs)
    harness.check_files(case, model, inputs, labels, outputs, tmp_path)
    harness.check_adapt(case, tmp_path)
