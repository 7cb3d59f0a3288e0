"""Relation networks: what is compared with what, and the squared error."""

import few_shot_episodes as data
import keras
import numpy as np
import pytest
from layer_harness import as_numpy

import nsl_keras
from experiments.few_shot.relation import RelationLoss, RelationNet, relation_module

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


def test_features_of_any_shape_with_a_custom_relation():
    """Vectors: a relation that computes the sum over features of the class sum."""
    pair = keras.Input((2 * data.SIZE,))
    dense = keras.layers.Dense(1, kernel_initializer="ones")
    relation = keras.Model(pair, dense(pair[:, : data.SIZE]))
    (support, labels, queries), _ = data.episodes()
    model = RelationNet(data.identity(), data.WAYS, relation)
    found = as_numpy(model((support, labels, queries)))
    for episode, way in np.ndindex(len(support), data.WAYS):
        expected = support[episode][labels[episode] == way].sum()
        np.testing.assert_allclose(found[episode, :, way], expected, rtol=1e-4, atol=1e-5)


def test_loss():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 4, 3)).astype("float32")
    labels = rng.integers(0, 3, size=(2, 4))
    scores = 1 / (1 + np.exp(-logits))
    expected = ((scores - np.eye(3)[labels]) ** 2).mean()
    loss = RelationLoss()
    np.testing.assert_allclose(loss(labels, logits), expected, rtol=1e-5)
    assert np.isnan(loss(labels + 1, logits))  # Some are outside the classes.
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(again).__name__ == "RelationLoss" and again.name == loss.name


def test_bad_input():
    inputs, _ = data.episodes()
    with pytest.raises(ValueError, match="`backbone` must return feature maps"):
        RelationNet(data.identity(), data.WAYS)(inputs)
    small, _ = data.episodes(shape=(3, 3, 2))
    with pytest.raises(ValueError, match="`map_shape` must be at least 4x4"):
        RelationNet(data.identity(3, 3, 2), data.WAYS)(small)
    pair = keras.Input((*SHAPE[:2], 4))
    wide = keras.Model(pair, keras.layers.Dense(2)(keras.layers.Flatten()(pair)))
    inputs, _ = data.episodes(shape=SHAPE)
    with pytest.raises(ValueError, match="`relation` must return one number"):
        RelationNet(data.identity(*SHAPE), data.WAYS, wide)(inputs)
    for arguments, name in (
        ({"map_shape": (7, 7)}, "map_shape"),
        ({"map_shape": (8, 8, 0)}, "map_shape"),
        ({"filters": 0}, "filters"),
        ({"units": 0}, "units"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            relation_module(**{"map_shape": (8, 8, 4), **arguments})
